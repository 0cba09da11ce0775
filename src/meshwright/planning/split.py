"""Which branch gets how many ranks: exact, by bisection over tables of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def best_split(tables: Sequence[Sequence[float]], ranks: int) -> tuple[int, ...]:
    """The ranks of each branch, at least one each and at most ``ranks`` together, with which the slowest is the fastest.

    A time t can be met if the fewest ranks with which each branch takes at most t are together no more than there are: that
    is so from some t on, and the least such t is in a table. Ranks that are left over would make nothing faster.

    Args:
        tables: for each branch its seconds on 1, 2 … ranks, at least ``ranks − len(tables) + 1`` of them; what is
            slower with more ranks counts as what fewer take, as ranks can do nothing.

    Raises:
        ValueError: where there are more branches than ranks.
    """
    if len(tables) > ranks:
        raise ValueError(f"{len(tables)} branches, and {ranks} ranks: a branch needs one")
    falling = [monotone(t[: ranks - len(tables) + 1]) for t in tables]
    times = sorted({t for table in falling for t in table})

    def needs(limit: float) -> list[int] | None:
        # Tables fall, and bisect wants what rises: from the end, negated.
        fewest = [bisect_left([-t for t in table], -limit) + 1 for table in falling]
        known = all(n <= len(t) for n, t in zip(fewest, falling, strict=True))
        return fewest if known and sum(fewest) <= ranks else None

    at = bisect_left(times, True, key=lambda t: needs(t) is not None)
    split = needs(times[at])
    assert split is not None  # the largest time can be met with a rank each
    return tuple(split)


def monotone(table: Sequence[float]) -> list[float]:
    """Each as the least up to there."""
    falling: list[float] = []
    for t in table:
        falling.append(min(t, falling[-1]) if falling else t)
    return falling


def imbalance(work: Sequence[float], split: Sequence[int]) -> float:
    """ρ = max(cᵢ/gᵢ) · G / Σcᵢ: how many times longer than if all G ranks were busy all the time, work cut evenly."""
    if not sum(work):
        return 1.0
    return max(c / g for c, g in zip(work, split, strict=True)) * sum(split) / sum(work)
