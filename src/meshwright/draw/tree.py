"""``Listing``: the tree of a model's modules, with a line for each parameter, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text
from rich.tree import Tree

from meshwright.draw.facts import ShardMap
from meshwright.draw.parameters import ParameterFacts, Row
from meshwright.draw.stages import stages_text
from meshwright.draw.text import layout_text, ranks_text, shape_text, slices_text
from meshwright.layout import REPLICATE, Shard

_GUIDE = 4  # characters that rich.tree uses for each level
_GAP = 2  # characters between two columns
_COLORS = {"tp": "cyan", "dp_shard": "green"}


@dataclass
class _Node:
    """A module, or a parameter.

    Attributes:
        label: the last part of its name.
        path: its full name; of folded modules, that of the first.
        copies: number of modules that are folded into it.
        row: of a parameter; None for a module.
        children: label → node.
    """

    label: str = ""
    path: str = ""
    copies: int = 1
    row: Row | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def joined(self) -> _Node:
        """The tree in which a module with a single child is joined with it, as in ``self_attn.q_proj.weight``."""
        children = {label: child.joined() for label, child in self.children.items()}
        if self.label and len(children) == 1:
            (only,) = children.values()
            return replace(only, label=f"{self.label}.{only.label}")
        return replace(self, children=children)

    def depths(self, depth: int = 0) -> Iterator[tuple[int, _Node]]:
        """(depth, node) of every node below this one."""
        for child in self.children.values():
            yield depth + 1, child
            yield from child.depths(depth + 1)


def _tree_of(rows: Iterable[Row]) -> _Node:
    """The tree of modules and parameters."""
    root = _Node()
    for row in rows:
        node, labels, parts = root, row.label.split("."), [name.split(".") for name in row.names]
        for end, label in enumerate(labels, 1):
            copies = len({tuple(part[:end]) for part in parts})
            node = node.children.setdefault(label, _Node(label, ".".join(parts[0][:end]), copies))
        node.row = row
    return root.joined()


@dataclass(frozen=True)
class Listing:
    """The tree with its columns, for rich to print. The layout depends on the width at which it is printed.

    Attributes:
        map: the facts.
        rows: to show.
        rank: whose slices are shown.
        width: columns to use; None: all of the console.
    """

    map: ShardMap
    rows: Sequence[Row]
    rank: int
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        yield _Columns(self.map, _tree_of(self.rows), self.rank, width).tree()


class _Columns:
    """The tree's lines, padded to columns. If the width is too small, the slices of the last column go below each line.

    Attributes:
        axes: the axes that have a column.
        units: modules that FSDP2 gathers at once.
        name_width: of the first column, with the guides of the tree.
        widths: of the other columns.
        slices_below: whether the slices go below each line.
    """

    def __init__(self, shard_map: ShardMap, root: _Node, rank: int, width: int) -> None:
        self.map, self.root, self.rank = shard_map, root, rank
        self.axes = _axes(shard_map)
        self.has_branches = bool(shard_map.recipe.branches)
        self.units = {unit.name for unit in shard_map.recipe.units if unit.name}
        nodes = list(root.depths())
        cells = [self.cells(node.row) for _, node in nodes if node.row]
        titles = self.titles()
        self.name_width = max([len("parameter"), *(_GUIDE * depth + cell_len(node.label) for depth, node in nodes)])
        self.widths = [max(cell_len(column[i]) for column in [titles, *cells]) for i in range(len(titles))]
        self.slices_below = self.name_width + sum(_GAP + column_width for column_width in self.widths) > width

    def titles(self) -> list[str]:
        """The titles of all columns but the first."""
        sizes = dict(self.map.mesh.axes)
        axes = [f"{axis}={sizes[axis]}" if sizes.get(axis, 1) > 1 else axis for axis in self.axes]
        return ["shape", *axes, *["ranks"] * self.has_branches, f"rank {self.rank} holds"]

    def cells(self, row: Row) -> list[str]:
        """The texts of a parameter in all columns but the first."""
        facts = row.first
        layouts = [
            stages_text(row) if axis == "pp" else layout_text(facts.on_axis(axis), len(facts.shape))
            for axis in self.axes
        ]
        layouts += [self.ranks(facts)] * self.has_branches
        name = self.map.example(row, self.rank)
        slices = slices_text(self.map.slices(name, self.rank), facts.shape)
        return [shape_text(facts), *layouts, slices if self.map.holds(name, self.rank) else "nothing"]

    def ranks(self, facts: ParameterFacts) -> str:
        """The ranks that hold a parameter, such as ``all``, or ``2–7 (tp[2:8])`` for one of a branch."""
        if facts.places == (0,):
            return "all" if facts.stages == (0,) else "of its stage"
        holders = sorted(rank for ranks, _ in self.map.held_by(facts.name) for rank in ranks)
        submeshes = [self.map.recipe.places.spelled(number) or "the trunk" for number in facts.places]
        return f"{ranks_text(holders)} ({', '.join(submeshes)})"

    def tree(self) -> Tree:
        """The whole tree, with the titles of the columns as its root."""
        titles = self.titles()[: -1 if self.slices_below else None]
        tree = Tree(self.line("parameter", 0, titles, ["bold"] * len(titles)), guide_style="dim")
        self.add_children(tree, self.root, 1)
        return tree

    def add_children(self, tree: Tree, node: _Node, depth: int) -> None:
        """Adds the modules and parameters below a node to its tree."""
        for child in node.children.values():
            if child.row is not None:
                tree.add(self.parameter_lines(child, child.row, depth))
                continue
            label = Text(child.label, style="bold")
            label.append(f" ×{child.copies}" if child.copies > node.copies else "")
            if child.path in self.units and self.map.mesh.data_size > 1:
                label.append("  gathered as one unit", style="dim not bold")
            self.add_children(tree.add(label), child, depth + 1)

    def parameter_lines(self, node: _Node, row: Row, depth: int) -> RenderableType:
        """The line of a parameter, with its remarks below it."""
        *cells, slices = self.cells(row)
        facts = row.first
        layouts = zip(self.axes, cells[1:], strict=False)  # (after the shape: axis, text of the layout)
        layout_styles = ["dim" if text == str(REPLICATE) else _COLORS.get(axis, "") for axis, text in layouts]
        styles = ["", *layout_styles, *[""] * self.has_branches]
        below = [Text.assemble((f"rank {self.rank} holds ", "dim"), slices)] if self.slices_below else []
        tp = self.map.recipe.places[facts.places[0]].tp > 1
        below += [Text(remark, style="dim") for remark in remarks(facts, tp)]
        if not self.slices_below:
            cells, styles = [*cells, slices], [*styles, ""]
        line = self.line(node.label, depth, cells, styles)
        return Group(line, *(Padding(text, (0, 0, 0, 2), expand=False) for text in below)) if below else line

    def line(self, label: str, depth: int, cells: Sequence[str], styles: Sequence[str]) -> Text:
        """A line of the tree: a label, and a cell for each column in its style."""
        label_width = self.name_width - _GUIDE * depth
        text = Text(label + " " * (label_width - cell_len(label)), no_wrap=True, overflow="ellipsis")
        for cell, width, style in zip(cells, self.widths, styles, strict=False):
            text.append(" " * _GAP)
            text.append(cell, style=style)
            text.append(" " * (width - cell_len(cell)))
        text.rstrip()
        return text


def _axes(shard_map: ShardMap) -> list[str]:
    """The axes that have a column: those of the mesh, and ``dp_shard`` if only a branch has it."""
    axes = [axis for axis, size in shard_map.mesh.axes if size > 1]
    if "dp_shard" not in axes and any(b.mesh.axis_size("dp_shard") > 1 for b in shard_map.recipe.branches):
        axes.insert(axes.index("tp"), "dp_shard")
    return axes


def remarks(facts: ParameterFacts, tp: bool = True) -> Iterator[str]:
    """Remarks on a parameter, for the lines below it.

    Args:
        tp: whether the mesh on which it is used has a tp axis.
    """
    if facts.aliases:
        yield f"the same tensor: {', '.join(facts.aliases)}"
    if not facts.requires_grad:
        yield "frozen"
    if facts.reason and tp and any(axis.split(" ")[0] == "tp" for axis in facts.layout):
        layout = "sharded" if isinstance(facts.on_axis("tp"), Shard) else "replicated"
        yield f"{layout} over tp: {facts.reason}"
