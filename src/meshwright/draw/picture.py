"""Draws one parameter as a grid of boxes, each with the ranks that hold that part."""

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

_MOST = 12  # most ranges of a dim that are drawn; of more, those in the middle are left out
_SHADES = ("blue", "magenta", "green", "yellow", "cyan", "red", "bright_black", "bright_blue")
_Band = Interval | None  # a range of a dim; None stands for the ranges that are left out


def picture(shard_map: ShardMap, row: Row, *, rank: int | None = None) -> RenderableType:
    """A parameter as a grid of boxes, each with the ranks that hold this part. Boxes of ``rank`` are highlighted.

    Rows of the grid are ranges of dim 0; columns are ranges of another sharded dim, else of dim 1. If that is too wide, rows
    and columns are swapped. Boxes of one colour are held by the same ranks.
    """
    facts = row.first
    if not facts.shape:
        return Text(f"{row}: a number, on every rank")
    parts = [(ranks, slices) for ranks, slices in shard_map.held_by(facts.name) if elements(slices)]
    bands = {dim: _few(sorted({r for _, slices in parts for r in slices[dim]})) for dim in _drawn_dims(facts)}
    down, *across = sorted(bands, key=lambda dim: -len(bands[dim])) if _too_wide(bands) else bands
    caption = Text.assemble((str(row), "bold"), f"   {shape_text(facts)} {facts.dtype}")
    table = Table(box=box.SQUARE, show_lines=True)
    dim_names = [dim_text(dim, len(facts.shape)) for dim in (down, *across)]
    table.add_column(Text(" \\ ".join(dim_names) or "ranges"), style="dim", no_wrap=True)
    columns: list[dict[int, _Band]] = [{dim: band} for dim in across for band in bands[dim]] or [{}]
    for column in columns:
        title = _band_text(column[across[0]]) if across else "held by"
        table.add_column(Text(title), justify="center", no_wrap=True)
    for band in bands[down]:
        table.add_row(Text(_band_text(band)), *(_cell(parts, {down: band, **column}, rank) for column in columns))
    without = [rank for ranks, slices in shard_map.held_by(facts.name) if not elements(slices) for rank in ranks]
    below = [Text(f"ranks {ranks_text(without)} hold nothing of it", style="dim")] if without else []
    return Group(caption, table, *below)


def _drawn_dims(facts: ParameterFacts) -> list[int]:
    """The one or two dims that are drawn: dim 0, and the first other dim that is sharded, else dim 1."""
    sharded = [layout.dim for layout in facts.layout.values() if isinstance(layout, Shard) and layout.dim]
    return [0, *(sharded or range(1, len(facts.shape)))][:2]


_ALWAYS_FIT = 4  # columns that fit beside each other in any terminal


def _too_wide(bands: Mapping[int, Sequence[_Band]]) -> bool:
    """Whether the grid has more columns than rows, and more than always fit."""
    return len(bands) == 2 and max(_ALWAYS_FIT, len(bands[0])) < max(map(len, bands.values()))


def _cell(parts: Sequence[tuple[tuple[int, ...], Slices]], box: Mapping[int, _Band], rank: int | None) -> Text:
    """The ranks that hold a box.

    Args:
        parts: (ranks, their slices) for each distinct part of the parameter.
        box: dim → range, for each drawn dim.
    """
    if None in box.values():
        return Text("…", style="dim")
    for index, (ranks, slices) in enumerate(parts):
        if all(band in slices[dim] for dim, band in box.items()):
            is_chosen = rank in ranks
            style = Style(color=_SHADES[index % len(_SHADES)], bold=is_chosen, reverse=is_chosen)
            return Text(f" {ranks_text(ranks)} ", style=style)
    return Text()


def _few(bands: Sequence[_Band]) -> list[_Band]:
    """The ranges to draw: all, or the first ones and the last."""
    return [*bands] if len(bands) <= _MOST else [*bands[: _MOST - 2], None, bands[-1]]


def _band_text(band: _Band) -> str:
    return "…" if band is None else f"{band[0]}:{band[1]}"
