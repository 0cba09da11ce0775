"""``balanced``: how many blocks each stage of a pipeline has, as planning cuts it: so that the stage with most work has least.

    min over all cuts of max(first + n₀ w, n₁ w, …, nₚ₋₁ w + last),  Σ nᵢ = blocks

Blocks are alike here, so the largest stage is one of few numbers, and the least of them with which all blocks have a place is
found by halving: exact, as ``planning.pipeline.choose_cuts`` is, which looks at every event.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import floor, inf

CLOSE = 1e-9  # what is equal but for rounding


@dataclass(frozen=True)
class Cut:
    """Blocks of the first stage, of the one between that has most, and of the last."""

    first: int
    between: int
    last: int


def balanced(blocks: int, stages: int, block: float, first: float, last: float) -> Cut:
    """The blocks of each of at least two stages.

    Args:
        blocks: to be had, at least as many as stages.
        block: work of each; ``first``, ``last``: of what comes before and after all blocks.

    >>> balanced(16, 4, 1.0, 0.0, 0.0), balanced(16, 4, 1.0, 0.5, 2.5)
    (Cut(first=4, between=4, last=4), Cut(first=4, between=5, last=2))
    """
    between = stages - 2

    def room(limit: float) -> tuple[int, int, int]:
        """Blocks that fit the first stage, one between and the last."""
        fits = (max(0, floor((limit - end) / block + CLOSE)) if block else blocks for end in (first, 0.0, last))
        one, two, three = (min(n, blocks) for n in fits)
        return one, two, three

    def holds(limit: float) -> bool:
        if limit < max(first, last):
            return False
        one, two, three = room(limit)
        return one + between * two + three >= blocks

    limits = sorted({end + n * block for end in (first, 0.0, last) for n in range(blocks + 1)})
    at = bisect_left(limits, True, key=holds)
    most = room(limits[at] if at < len(limits) else inf)
    even = -(-blocks // stages)  # where there is room, stages are as large as others: planning looks at memory next
    begin, end = min(most[0], even), min(most[2], even)
    middle = min(most[1], -(-max(0, blocks - begin - end) // between)) if between else 0
    begin = max(begin, min(most[0], blocks - end - between * middle))
    return Cut(begin, middle, max(end, blocks - begin - between * middle))
