"""A shard map for the terminal: a tree of modules, a line a parameter, and pictures of who holds which part.

    parameter                          shape      dp_shard=2  tp=2   rank 3 holds
    ├── embed.weight                   256×64     rows        rows   rows 192:256
    └── layers.{0…3} ×4
        ├── up.weight                  256×64     rows        rows   rows 192:256
        └── down.weight                64×256     rows        cols   rows 32:64, cols 128:256

Words: *rows* are dim 0 and *cols* dim 1 of a matrix; of other tensors the dims go by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from meshwright.draw.branches import branches
from meshwright.draw.facts import FEW_RANKS, ParameterFacts, Row, ShardMap, elements
from meshwright.draw.stages import stages, stages_text
from meshwright.layout import Cut, Interval, Layout
from meshwright.recipe import Slices

_GUIDE = 4  # columns that rich.tree spends a level
_GAP = 2  # columns between two columns
_UNBROKEN = 1_000_000  # columns
_MOST = 12  # bands of a picture that are drawn in full
_COLORS = {"tp": "cyan", "dp_shard": "green"}
_SHADES = ("blue", "magenta", "green", "yellow", "cyan", "red", "bright_black", "bright_blue")


def render(
    shard_map: ShardMap,
    *,
    rank: int | None = None,
    width: int | None = None,
    parameter: str | None = None,
    pictures: int | None = None,
) -> RenderableType:
    """A shard map, as rich prints it.

    Args:
        rank: whose slices are shown; default 0.
        width: columns to use; default those of the console.
        parameter: only parameters that fit this glob.
        pictures: of how many lines a picture is drawn, of who holds which part, from the first on; default 3 where
            ``parameter`` is given, else 0.

    Raises:
        ValueError: the mesh has no such rank.
        KeyError: no parameter fits.
    """
    shown = 0 if rank is None else rank
    shard_map.mesh.coordinate(shown)  # raises for one that is not there
    rows = shard_map.rows if parameter is None else shard_map.matching(parameter)
    drawn = (0 if parameter is None else 3) if pictures is None else pictures
    above = () if parameter is not None else (heading(shard_map, shown), Text())
    below = (
        ()
        if parameter is not None
        else (
            *stages(shard_map.recipe),
            *branches(shard_map),
            *notes(shard_map),
        )
    )
    return Group(*above, _Listing(shard_map, rows, shown, width), *below, *_drawings(shard_map, rows, rank, drawn))


def _drawings(shard_map: ShardMap, rows: Sequence[Row], rank: int | None, most: int) -> Iterator[RenderableType]:
    """Pictures of the first rows; and of how many there is none, where some were asked for."""
    for row in rows[:most]:
        yield Text()
        yield picture(shard_map, row, rank=rank)
    if 0 < most < len(rows):
        yield Text(f"\n{len(rows) - most} more without a picture", style="dim")


def console(*, stderr: bool = False) -> Console:
    """Where pictures and reports are printed: as wide as the terminal; in a pipe or a file no line is broken."""
    found = Console(stderr=stderr, highlight=False, emoji=False)  # names and slices have colons: 75:100: is no picture
    if not found.is_terminal:
        found.width = _UNBROKEN
    return found


def heading(shard_map: ShardMap, rank: int) -> Text:
    """The mesh, who is with whom on it, and how large the model is."""
    mesh = shard_map.mesh
    few = mesh.size <= FEW_RANKS
    text = Text(mesh.picture() if few else f"{mesh}: {mesh.size} ranks")
    text.append("\n\n" if few else "\n")
    least, most = min(shard_map.bytes_by_rank), max(shard_map.bytes_by_rank)
    sizes = list(dict.fromkeys((size_text(least), size_text(most))))
    text.append(f"{count_text(shard_map.numel)} parameters, {size_text(shard_map.bytes)}", style="bold")
    text.append(f"; at rest a rank holds {' to '.join(sizes)}")
    text.append(f"\nrank {rank} holds {size_text(shard_map.bytes_at(rank))}" if len(sizes) > 1 else "")
    return text


def notes(shard_map: ShardMap) -> Iterator[RenderableType]:
    """What a person should know beyond the lines."""
    if shard_map.recipe.notes:
        yield Text("\nnotes", style="bold")
    for note in shard_map.recipe.notes:
        yield Padding(Text(f"– {note}"), (0, 0, 0, 2), expand=False)


# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A module, or a parameter: the one with a row."""

    label: str = ""
    path: str = ""  # the module's name; of folded ones the first's
    copies: int = 1  # how many are folded into it
    row: Row | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def joined(self) -> _Node:
        """A module with one child only is one node with it, as in ``self_attn.q_proj.weight``."""
        children = {label: child.joined() for label, child in self.children.items()}
        if self.label and len(children) == 1:
            (only,) = children.values()
            return replace(only, label=f"{self.label}.{only.label}")
        return replace(self, children=children)

    def depths(self, depth: int = 0) -> Iterator[tuple[int, _Node]]:
        for child in self.children.values():
            yield depth + 1, child
            yield from child.depths(depth + 1)


def _grown(rows: Iterable[Row]) -> _Node:
    """The tree of modules over the rows."""
    root = _Node()
    for row in rows:
        node, labels, parts = root, row.label.split("."), [name.split(".") for name in row.names]
        for end, label in enumerate(labels, 1):
            copies = len({tuple(part[:end]) for part in parts})
            node = node.children.setdefault(label, _Node(label, ".".join(parts[0][:end]), copies))
        node.row = row
    return root.joined()


@dataclass(frozen=True)
class _Listing:
    """The tree with its columns, laid out for the width it is printed at."""

    map: ShardMap
    rows: Sequence[Row]
    rank: int
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        yield _Columns(self.map, _grown(self.rows), self.rank, width).tree()


class _Columns:
    """The tree's lines, padded so that they stand in columns; what is too wide goes below its line."""

    def __init__(self, shard_map: ShardMap, root: _Node, rank: int, width: int) -> None:
        self.map, self.root, self.rank = shard_map, root, rank
        self.axes = _axes(shard_map)
        self.parted = bool(shard_map.recipe.branches)
        self.units = {unit.name for unit in shard_map.recipe.units if unit.name}
        nodes = list(root.depths())
        cells = [self.cells(node.row) for _, node in nodes if node.row]
        titles = self.titles()
        self.name = max([len("parameter"), *(_GUIDE * depth + cell_len(node.label) for depth, node in nodes)])
        self.wide = [max(cell_len(column[i]) for column in [titles, *cells]) for i in range(len(titles))]
        self.below = self.name + sum(_GAP + w for w in self.wide) > width

    def titles(self) -> list[str]:
        sizes = dict(self.map.mesh.axes)
        axes = [f"{axis}={sizes[axis]}" if sizes.get(axis, 1) > 1 else axis for axis in self.axes]
        return ["shape", *axes, *["ranks"] * self.parted, f"rank {self.rank} holds"]

    def cells(self, row: Row) -> list[str]:
        facts = row.first
        layouts = [
            stages_text(facts.stages) if axis == "pp" else layout_text(facts.on_axis(axis), len(facts.shape))
            for axis in self.axes
        ]
        layouts += [self.ranks(facts)] * self.parted
        held = slices_text(self.map.slices(facts.name, self.rank), facts.shape)
        return [shape_text(facts), *layouts, held if self.map.holds(facts.name, self.rank) else "nothing"]

    def ranks(self, facts: ParameterFacts) -> str:
        """Who holds a parameter; of one of a branch ``2–7 (tp[2:8])``."""
        if facts.places == (0,):
            return "all" if facts.stages == (0,) else "of its stage"
        held = sorted(rank for ranks, _ in self.map.held_by(facts.name) for rank in ranks)
        places = [self.map.recipe.places.spelled(p) or "the trunk" for p in facts.places]
        return f"{ranks_text(held)} ({', '.join(places)})"

    def tree(self) -> Tree:
        titles = self.titles()[: -1 if self.below else None]
        tree = Tree(self.line("parameter", 0, titles, ["bold"] * len(titles)), guide_style="dim")
        self.grow(tree, self.root, 1)
        return tree

    def grow(self, tree: Tree, node: _Node, depth: int) -> None:
        for child in node.children.values():
            if child.row is not None:
                tree.add(self.leaf(child, child.row, depth))
                continue
            label = Text(child.label, style="bold")
            label.append(f" ×{child.copies}" if child.copies > node.copies else "")
            if child.path in self.units and self.map.mesh.data_size > 1:
                label.append("  gathered as one unit", style="dim not bold")
            self.grow(tree.add(label), child, depth + 1)

    def leaf(self, node: _Node, row: Row, depth: int) -> RenderableType:
        *cells, held = self.cells(row)
        facts = row.first
        styles = [
            "",
            *("dim" if cell == "whole" else _COLORS.get(a, "") for a, cell in zip(self.axes, cells[1:], strict=False)),
            *[""] * self.parted,
        ]
        below = [Text.assemble((f"rank {self.rank} holds ", "dim"), held)] if self.below else []
        tp = self.map.recipe.places[facts.places[0]].tp > 1
        below += [Text(remark, style="dim") for remark in remarks(facts, tp)]
        if not self.below:
            cells, styles = [*cells, held], [*styles, ""]
        line = self.line(node.label, depth, cells, styles)
        return Group(line, *(Padding(text, (0, 0, 0, 2), expand=False) for text in below)) if below else line

    def line(self, label: str, depth: int, cells: Sequence[str], styles: Sequence[str]) -> Text:
        name = self.name - _GUIDE * depth
        text = Text(label + " " * (name - cell_len(label)), no_wrap=True, overflow="ellipsis")
        for cell, wide, style in zip(cells, self.wide, styles, strict=False):
            text.append(" " * _GAP)
            text.append(cell, style=style)
            text.append(" " * (wide - cell_len(cell)))
        text.rstrip()
        return text


def _axes(shard_map: ShardMap) -> list[str]:
    """The axes that have a column: those of the mesh, and ``dp_shard`` where a branch alone has it."""
    axes = [axis for axis, size in shard_map.mesh.axes if size > 1]
    if "dp_shard" not in axes and any(b.mesh.axis_size("dp_shard") > 1 for b in shard_map.recipe.branches):
        axes.insert(axes.index("tp"), "dp_shard")
    return axes


def remarks(facts: ParameterFacts, tp: bool = True) -> Iterator[str]:
    """What is to be said of a parameter below its line. ``tp``: whether there is such an axis where it is used."""
    if facts.aliases:
        yield f"the same tensor: {', '.join(facts.aliases)}"
    if not facts.requires_grad:
        yield "frozen"
    if facts.reason and tp and any(axis.split(" ")[0] == "tp" for axis in facts.layout):
        cut = isinstance(facts.on_axis("tp"), Cut)
        yield f"{'cut' if cut else 'whole'} over tp: {facts.reason}"


# --- words ------------------------------------------------------------------------------------------------------------


def dim_text(dim: int, dims: int) -> str:
    """What a dim is called: *rows* and *cols* of a matrix; nothing, of a tensor with one dim."""
    if dims == 1:
        return ""
    return ("rows", "cols")[dim] if dims == 2 else f"dim {dim}"


def layout_text(layout: Layout, dims: int) -> str:
    """A layout in a word: what of a tensor is cut."""
    if not isinstance(layout, Cut):
        return str(layout)
    word = dim_text(layout.dim, dims) or "cut"
    return word if layout.parts == 1 else f"{word} of {layout.parts} blocks"


def slices_text(slices: Slices, shape: Sequence[int]) -> str:
    """What a rank holds: ``rows 64:128, cols 0:32``; *all*, or *nothing*."""
    if not elements(slices):
        return "nothing"
    said = [
        f"{dim_text(dim, len(shape))} {ranges_text(ranges)}".strip()
        for dim, (ranges, size) in enumerate(zip(slices, shape, strict=True))
        if ranges != ((0, size),)
    ]
    return ", ".join(said) or "all"


def ranges_text(ranges: Sequence[Interval], most: int = 4) -> str:
    """Half-open ranges as Python writes slices, ``0:4+8:12``; *–* where there is none."""
    said = [f"{start}:{stop}" for start, stop in ranges[:most]]
    return "+".join([*said, *(["…"] if len(ranges) > most else [])]) or "–"


def shape_text(facts: ParameterFacts) -> str:
    return "×".join(map(str, facts.shape)) or "scalar"


def size_text(size: float) -> str:
    """Bytes, in a unit that leaves a small number.

    >>> size_text(26615936)
    '25.4 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count_text(count: float) -> str:
    """A count, in a unit that leaves a small number.

    >>> count_text(6738415616)
    '6.74 G'
    """
    for unit in ("", " k", " M", " G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


# --- who holds which part ---------------------------------------------------------------------------------------------


def picture(shard_map: ShardMap, row: Row, *, rank: int | None = None) -> RenderableType:
    """A parameter as a grid of boxes, each with the ranks that hold it; ``rank``'s own stand out.

    Rows of the grid are ranges of dim 0, columns ranges of another dim that is cut (else of dim 1); the other way
    round where that would be too wide. Boxes of one colour are held by the same ranks.
    """
    facts = row.first
    if not facts.shape:
        return Text(f"{row}: a number, on every rank")
    held = [(ranks, slices) for ranks, slices in shard_map.held_by(facts.name) if elements(slices)]
    bands = {dim: _few(sorted({r for _, slices in held for r in slices[dim]})) for dim in _drawn(facts)}
    down, *across = sorted(bands, key=lambda dim: -len(bands[dim])) if _too_wide(bands) else bands
    caption = Text.assemble((str(row), "bold"), f"   {shape_text(facts)} {facts.dtype}")
    table = Table(box=box.SQUARE, show_lines=True)
    words = [dim_text(dim, len(facts.shape)) for dim in (down, *across)]
    table.add_column(Text(" \\ ".join(words) or "ranges"), style="dim", no_wrap=True)
    columns: list[dict[int, _Band]] = [{dim: band} for dim in across for band in bands[dim]] or [{}]
    for column in columns:
        title = _band_text(column[across[0]]) if across else "held by"
        table.add_column(Text(title), justify="center", no_wrap=True)
    for band in bands[down]:
        table.add_row(Text(_band_text(band)), *(_cell(held, {down: band, **column}, rank) for column in columns))
    idle = [r for ranks, slices in shard_map.held_by(facts.name) if not elements(slices) for r in ranks]
    below = [Text(f"ranks {ranks_text(idle)} hold nothing of it", style="dim")] if idle else []
    return Group(caption, table, *below)


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks as ``0, 4``; many of them as ``0–7`` or ``0, 8 … 120``."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > most:
        return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
    return ", ".join(map(str, ranks))


_Band = Interval | None  # None: those between, which are left out


def _drawn(facts: ParameterFacts) -> list[int]:
    """The dims that are drawn: the first, and one that is cut, else the next; one alone where there is no other."""
    dims = [layout.dim for layout in facts.layout.values() if isinstance(layout, Cut) and layout.dim]
    return [0, *(dims or range(1, len(facts.shape)))][:2]


def _too_wide(bands: Mapping[int, Sequence[_Band]]) -> bool:
    return len(bands) == 2 and max(4, len(bands[0])) < max(map(len, bands.values()))


def _cell(held: Sequence[tuple[tuple[int, ...], Slices]], place: Mapping[int, _Band], rank: int | None) -> Text:
    """The ranks that hold the box at a place: a range of each drawn dim."""
    if None in place.values():
        return Text("…", style="dim")
    for index, (ranks, slices) in enumerate(held):
        if all(band in slices[dim] for dim, band in place.items()):
            mine = rank in ranks
            style = Style(color=_SHADES[index % len(_SHADES)], bold=mine, reverse=mine)
            return Text(f" {ranks_text(ranks)} ", style=style)
    return Text()


def _few(bands: Sequence[_Band]) -> list[_Band]:
    return [*bands] if len(bands) <= _MOST else [*bands[: _MOST - 2], None, bands[-1]]


def _band_text(band: _Band) -> str:
    return "…" if band is None else f"{band[0]}:{band[1]}"
