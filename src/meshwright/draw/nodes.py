"""Prints the nodes of a mesh, each a box with its ranks, and for each axis the links that a group communicates over.

┌ node 0 ──────────────────┐  ┌ node 1 ──────────────────┐
│             tp 0  tp 1   │  │             tp 0  tp 1   │
│ dp_shard 0     0     1   │  │ dp_shard 2     4     5   │
│ dp_shard 1     2     3   │  │ dp_shard 3     6     7   │
└──────────────────────────┘  └──────────────────────────┘

dp_shard  0 ─ 2 ═ 4 ─ 6  between 2 nodes, 2 ranks on each
tp        0 ─ 1          within a node
─ within a node   ═ between nodes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from meshwright.draw.topology import AxisLinks, Topology

_MOST = 8  # most columns and lines of a node, and most ranks of a group, that are drawn
_NODES = 4  # most nodes that are drawn, if there are more than fit a screen
_COLUMNS = 120  # most characters of a line of boxes
_BETWEEN = "bold magenta"
_LEFT_OUT = "…"


@dataclass(frozen=True)
class Nodes:
    """Prints the box of each node, with its ranks; as many beside each other as the terminal has room for."""

    topology: Topology

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _COLUMNS)
        boxes = [
            [_LEFT_OUT] if node is None else _box(f"node {node}", _ranks(self.topology, node, width - len("│  │")))
            for node in _few(range(self.topology.nodes), _NODES if self.topology.nodes > _MOST else _MOST)
        ]
        yield Text("\n".join(_beside(boxes, width)), no_wrap=True)


def links(topology: Topology) -> Text:
    """A line for each axis: a group of its ranks, and the links between them. Empty for a mesh of one rank."""
    names = max(map(len, topology.mesh.names))
    groups = [_group(topology, axis) for axis in topology.axes]
    width = max(map(len, groups), default=0)
    lines = [
        Text.assemble(axis.axis.ljust(names), "  ", group, " " * (width - len(group)), f"  {axis}")
        for axis, group in zip(topology.axes, groups, strict=True)
    ]
    if any(axis.crossing for axis in topology.axes):
        lines.append(Text.assemble(("─ within a node   ", "dim"), ("═ between nodes", _BETWEEN)))
    return Text("\n").join(lines)


def _group(topology: Topology, axis: AxisLinks) -> Text:
    """The ranks of a group with the link from each to the next one: ``0 ─ 2 ═ 4 ─ 6``."""
    ranks = _few(axis.example)
    text = Text(str(ranks[0]))
    for before, rank in pairwise(ranks):
        if rank is None:
            text.append(f" {_LEFT_OUT} ")
            continue
        if before is not None:
            is_between = topology.node_of(before) != topology.node_of(rank)
            text.append(" ═ " if is_between else " ─ ", style=_BETWEEN if is_between else "")
        text.append(str(rank))
    return text


def _ranks(topology: Topology, node: int, width: int) -> list[str]:
    """The ranks of a node as lines of a table, with as many columns as ``width`` characters have room for."""
    tables = [_table(topology, node, most) for most in range(_MOST, 1, -1)]
    return next((table for table in tables if len(table[0]) <= width), tables[-1])


def _table(topology: Topology, node: int, most: int) -> list[str]:
    """The ranks of a node as lines of a table: a column for each index on the last axis, a line for each combination of the
    other axes. Axes of size 1 are left out. If a line also has ranks of another node, these are blank.

    Args:
        most: number of columns. If there are more, those in the middle are left out.
    """
    mesh, ranks = topology.mesh, topology.ranks_of(node)
    *outer, (last, width) = [axis for axis in mesh.axes if axis[1] > 1] or mesh.axes[-1:]
    indices = sorted({rank % width for rank in ranks})
    columns = _few(indices, most)
    table = [["", *(_LEFT_OUT if index is None else f"{last} {index}" for index in columns)]]
    for number in _few(range(ranks[0] // width, ranks[-1] // width + 1)):
        if number is None:
            table.append([_LEFT_OUT] * (len(columns) + 1))
            continue
        coordinate = mesh.coordinate(number * width)
        label = " · ".join(f"{axis} {coordinate[axis]}" for axis, _ in outer)
        cells = (_LEFT_OUT if index is None else _cell(number * width + index, ranks) for index in columns)
        table.append([label, *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for label, *cells in table]
    return lines if outer else [line[len("  ") :] for line in lines]  # without outer axes the labels are empty


def _cell(rank: int, ranks: range) -> str:
    return str(rank) if rank in ranks else ""


def _box(title: str, lines: Sequence[str]) -> list[str]:
    width = max(len(title), *map(len, lines))
    return [
        f"┌ {title} {'─' * (width - len(title))}┐",
        *(f"│ {line.ljust(width)} │" for line in lines),
        f"└{'─' * (width + 2)}┘",
    ]


def _beside(boxes: Sequence[list[str]], width: int) -> Iterator[str]:
    """The lines of boxes, as many beside each other as ``width`` characters have room for."""
    groups: list[list[list[str]]] = [[]]  # boxes that stand beside each other
    for box in boxes:
        if groups[-1] and sum(len(other[0]) + 2 for other in [*groups[-1], box]) - 2 > width:
            groups.append([])
        groups[-1].append(box)
    for group in groups:
        for parts in zip_longest(*group, fillvalue=""):
            yield "  ".join(part.ljust(len(box[0])) for part, box in zip(parts, group, strict=True)).rstrip()


def _few(items: Sequence[int], most: int = _MOST) -> list[int | None]:
    """The items; of more than ``most`` the first ones and the last, with None for those between."""
    return [*items] if len(items) <= most else [*items[: most // 2], None, items[-1]]
