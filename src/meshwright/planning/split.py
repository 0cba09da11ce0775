"""Which branch gets how many ranks: exact, by bisection over tables of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def best_split(tables: Sequence[Sequence[float]], ranks: int) -> tuple[int, ...]:
    """How many ranks each branch gets so that the slowest branch is as fast as possible. Each gets at least one.

    A time t is possible if the smallest numbers of ranks with which each branch takes at most t add up to at most ``ranks``.
    From the smallest such t on, all are possible, and it is an entry of a table: bisection finds it. The sum may be less than
    ``ranks``; the other ranks would make nothing faster.

    Args:
        tables: for each branch its seconds on 1, 2, … ranks, at least ``ranks − len(tables) + 1`` entries. If more ranks are
            slower, the time of fewer ranks counts, since a rank may be left idle.

    Raises:
        ValueError: there are more branches than ranks.
    """
    if len(tables) > ranks:
        raise ValueError(f"{len(tables)} branches, and {ranks} ranks: a branch needs one")
    falling = [monotone(t[: ranks - len(tables) + 1]) for t in tables]
    times = sorted({t for table in falling for t in table})

    def needs(limit: float) -> list[int] | None:
        # Tables decrease, and bisect needs an increasing list: negate.
        fewest = [bisect_left([-t for t in table], -limit) + 1 for table in falling]
        known = all(n <= len(t) for n, t in zip(fewest, falling, strict=True))
        return fewest if known and sum(fewest) <= ranks else None

    at = bisect_left(times, True, key=lambda t: needs(t) is not None)
    split = needs(times[at])
    assert split is not None  # the largest time can be met with a rank each
    return tuple(split)


def monotone(table: Sequence[float]) -> list[float]:
    """The running minimum of a table."""
    falling: list[float] = []
    for t in table:
        falling.append(min(t, falling[-1]) if falling else t)
    return falling


def imbalance(work: Sequence[float], split: Sequence[int]) -> float:
    """ρ = max(cᵢ/gᵢ) · G / Σcᵢ: the time, divided by that of G ranks that are always busy, if work divides evenly.

    Args:
        work: cᵢ, the work of each branch; ``split``: gᵢ, its ranks. G is their sum.
    """
    if not sum(work):
        return 1.0
    return max(c / g for c, g in zip(work, split, strict=True)) * sum(split) / sum(work)
