"""Runs: ways to cut 0..n into so many, one for each stage, each within a limit.

A limit is given as *earliest*: the end of a run → the earliest begin that it may have. What a run takes grows with the
run, so an earliest begin never falls as ends rise, and for one limit all ends are seen in one pass (two pointers). So a
whole question costs stages × n, and what is the smallest limit is found by halving.

     0    1    2    3    4    5    6      ends
    [0,   0,   0,   1,   2,   2,   4]     earliest: a run that ends at 6 begins at 4 or 5
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Earliest = Sequence[int]


@dataclass(frozen=True)
class Runs:
    """The ways to cut 0..``n``.

    Attributes:
        pinned: for each stage, the earliest begins that the plan allows.
        empty: whether runs but the last may be empty.
    """

    n: int
    pinned: Sequence[Earliest]
    empty: bool = False

    def smallest(self, most: int, earliest: Callable[[int], Earliest]) -> int | None:
        """The smallest limit, at most ``most``, within which there is a way; None if there is none."""
        if not self._possible(earliest(most)):
            return None
        return bisect_left(range(most), True, key=lambda limit: self._possible(earliest(limit)))

    def cheapest(self, earliest: Earliest, cost: Sequence[int]) -> list[int]:
        """Where runs 1, 2 … begin, at the smallest sum of the costs of begins; there must be a way. Of equal ones the last
        run is the longest, then the one before."""
        best: list[int | None] = [0, *[None] * self.n]
        begins: list[list[int]] = []
        for stage, pinned in enumerate(self.pinned):
            best, chosen = self._next(best, stage, earliest, pinned, cost)
            begins.append(chosen)
        cuts, end = list[int](), self.n
        for chosen in reversed(begins[1:]):
            end = chosen[end]
            cuts.append(end)
        return cuts[::-1]

    def _fewest(self, stage: int) -> int:
        return 0 if self.empty and stage < len(self.pinned) - 1 else 1

    def _possible(self, earliest: Earliest) -> bool:
        ends = [True, *[False] * self.n]  # where the runs so far may end
        for stage, pinned in enumerate(self.pinned):
            before, fewest = [0, *accumulate(ends)], self._fewest(stage)  # before[i]: how many of the ends below i
            ends = [
                before[max(j + 1 - fewest, 0)] > before[max(begin)]
                for j, begin in enumerate(zip(earliest, pinned, strict=True))
            ]
        return ends[self.n]

    def _next(
        self, best: Sequence[int | None], stage: int, earliest: Earliest, pinned: Earliest, cost: Sequence[int]
    ) -> tuple[list[int | None], list[int]]:
        """The least cost up to each end with one run more, and where that run begins (-1: it cannot end there)."""
        window: deque[tuple[int, int]] = deque()  # (cost, begin): both rise; the first is the cheapest that is allowed
        sums, chosen, fewest = list[int | None](), list[int](), self._fewest(stage)
        for end in range(self.n + 1):
            begin = end - fewest
            if begin >= 0 and (known := best[begin]) is not None:
                total = known + cost[begin]
                while window and window[-1][0] > total:
                    window.pop()
                window.append((total, begin))
            while window and window[0][1] < max(earliest[end], pinned[end]):
                window.popleft()
            sums.append(window[0][0] if window else None)
            chosen.append(window[0][1] if window else -1)
        return sums, chosen


__all__ = ["Earliest", "Runs"]
