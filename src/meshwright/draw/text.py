"""Ranks, layouts and slices as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from meshwright.draw.parameters import ParameterFacts, elements
from meshwright.layout import Interval, Layout, Shard
from meshwright.recipe import Slices


def dim_text(dim: int, dims: int) -> str:
    """The name of a dim: ``rows`` or ``cols`` of a matrix, ``dim 2`` of other tensors; empty for a tensor with one dim."""
    if dims == 1:
        return ""
    return ("rows", "cols")[dim] if dims == 2 else f"dim {dim}"


def layout_text(layout: Layout, dims: int) -> str:
    """A layout as a short text: ``rows`` for ``Shard(0)`` of a matrix, ``Replicate``."""
    if not isinstance(layout, Shard):
        return str(layout)
    word = dim_text(layout.dim, dims) or f"Shard({layout.dim})"
    return word if layout.parts == 1 else f"{word} of {layout.parts} blocks"


def slices_text(slices: Slices, shape: Sequence[int]) -> str:
    """Slices as text: ``rows 64:128, cols 0:32``; ``all``; ``nothing``."""
    if not elements(slices):
        return "nothing"
    sharded_dims = [
        f"{dim_text(dim, len(shape))} {ranges_text(ranges)}".strip()
        for dim, (ranges, size) in enumerate(zip(slices, shape, strict=True))
        if ranges != ((0, size),)
    ]
    return ", ".join(sharded_dims) or "all"


def ranges_text(ranges: Sequence[Interval], most: int = 4) -> str:
    """Half-open ranges as Python writes slices, ``0:4+8:12``; *–* where there is none."""
    texts = [f"{start}:{stop}" for start, stop in ranges[:most]]
    return "+".join([*texts, *(["…"] if len(ranges) > most else [])]) or "–"


def shape_text(facts: ParameterFacts) -> str:
    return "×".join(map(str, facts.shape)) or "scalar"


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks as ``0, 4``; many of them as ``0–7`` or ``0, 8 … 120``."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > most:
        return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
    return ", ".join(map(str, ranks))


def bar(share: float, cells: int) -> str:
    """A bar of ``cells`` characters, filled to a share from 0 to 1, in steps of an eighth of a character.

    >>> bar(0.5, 3)
    '█▌ '
    """
    eighths = round(8 * cells * share)
    full, rest = divmod(eighths, 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)).ljust(cells)


def sparkline(amounts: Sequence[float], most: float, cells: int = 60) -> str:
    """Amounts as a line of bars of eight heights. If there are more than ``cells``, each bar shows the largest of several.

    >>> sparkline([1, 4, 8, 2], most=8)
    '▁▄█▂'
    """
    if len(amounts) > cells:
        ends = [len(amounts) * i // cells for i in range(cells + 1)]
        amounts = [max(amounts[start:stop]) for start, stop in pairwise(ends)]
    return "".join("▁▂▃▄▅▆▇█"[max(0, min(7, ceil(8 * amount / most) - 1))] for amount in amounts)
