"""``balanced``: the number of blocks of each pipeline stage, so that the work of the largest stage is as small as possible.

    min over all cuts of max(first + n₀ w, n₁ w, …, nₚ₋₁ w + last),  Σ nᵢ = blocks

Planning cuts stages by the same rule. Blocks are alike here, so the work of the largest stage has few
possible values. Bisection finds the smallest value with which all blocks fit. The result is exact, like that of
``planning.pipeline.choose_cuts``, which looks at every event.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import floor, inf

CLOSE = 1e-9  # difference of equal values, by rounding


@dataclass(frozen=True)
class StageBlocks:
    """Numbers of blocks: of the first stage, of the largest stage between, and of the last stage."""

    first: int
    between: int
    last: int


def balanced(blocks: int, stages: int, block: float, first: float, last: float) -> StageBlocks:
    """The number of blocks of each stage.

    Args:
        blocks: number of blocks, at least ``stages``.
        stages: at least 2.
        block: work of each block.
        first, last: work of the layers before all blocks, and of those after all blocks.

    >>> balanced(16, 4, 1.0, 0.0, 0.0), balanced(16, 4, 1.0, 0.5, 2.5)
    (StageBlocks(first=4, between=4, last=4), StageBlocks(first=4, between=5, last=2))
    """
    between = stages - 2

    def room(limit: float) -> tuple[int, int, int]:
        """The most blocks of (the first stage, a stage between, the last stage) with at most ``limit`` work in each."""
        fits = (max(0, floor((limit - end) / block + CLOSE)) if block else blocks for end in (first, 0.0, last))
        one, two, three = (min(n, blocks) for n in fits)
        return one, two, three

    def fits_all(limit: float) -> bool:
        """Whether all blocks fit if each stage has at most ``limit`` work."""
        if limit < max(first, last):
            return False
        one, two, three = room(limit)
        return one + between * two + three >= blocks

    limits = sorted({end + n * block for end in (first, 0.0, last) for n in range(blocks + 1)})
    at = bisect_left(limits, True, key=fits_all)
    most = room(limits[at] if at < len(limits) else inf)
    even = -(-blocks // stages)  # if work allows it, stages have equal numbers of blocks: planning looks at memory next
    begin, end = min(most[0], even), min(most[2], even)
    middle = min(most[1], -(-max(0, blocks - begin - end) // between)) if between else 0
    begin = max(begin, min(most[0], blocks - end - between * middle))
    return StageBlocks(begin, middle, max(end, blocks - begin - between * middle))
