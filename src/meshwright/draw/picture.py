"""One parameter as a grid of boxes: who holds which part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from meshwright.draw.facts import ShardMap
from meshwright.draw.parameters import ParameterFacts, Row, elements
from meshwright.draw.text import dim_text, ranks_text, shape_text
from meshwright.layout import Interval, Shard
from meshwright.recipe import Slices

_MOST = 12  # bands of a picture that are drawn in full
_SHADES = ("blue", "magenta", "green", "yellow", "cyan", "red", "bright_black", "bright_blue")
_Band = Interval | None  # None: those between, which are left out


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


def _drawn(facts: ParameterFacts) -> list[int]:
    """The dims that are drawn: the first, and one that is cut, else the next; one alone where there is no other."""
    dims = [layout.dim for layout in facts.layout.values() if isinstance(layout, Shard) and layout.dim]
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
