"""``CutPlans``: ways to cut 0..n into consecutive runs, one for each stage, of which each stays within a limit.

A limit is passed as *earliest*, one for each stage: the end of a run → the earliest begin that the run may have. A run's cost
grows with its length, so the earliest begin never decreases as the end grows, and one pass with two pointers finds it for all
ends. Testing one limit takes stages × n steps; bisection finds the smallest limit.

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
class CutPlans:
    """The ways to cut 0..``n``.

    Attributes:
        pinned: for each stage, the earliest begins that the plan allows.
        empty: whether runs other than the last may be empty.
    """

    n: int
    pinned: Sequence[Earliest]
    empty: bool = False

    def smallest(self, most: int, earliest: Callable[[int], Sequence[Earliest]]) -> int | None:
        """The smallest limit up to ``most`` within which the cut is possible; None if there is none. ``earliest`` maps a limit
        to its earliest begins, for each stage."""
        if not self._possible(earliest(most)):
            return None
        return bisect_left(range(most), True, key=lambda limit: self._possible(earliest(limit)))

    def cheapest(self, earliest: Sequence[Earliest], cost: Sequence[int]) -> list[int]:
        """The begins of runs 1, 2, … with the smallest sum of ``cost[begin]``. Of equal sums, the last run is the longest, then
        the one before it. A cut within ``earliest`` must exist."""
        best: list[int | None] = [0, *[None] * self.n]
        begins: list[list[int]] = []
        for stage, pinned in enumerate(self.pinned):
            best, chosen = self._next(best, stage, earliest[stage], pinned, cost)
            begins.append(chosen)
        cuts, end = list[int](), self.n
        for chosen in reversed(begins[1:]):
            end = chosen[end]
            cuts.append(end)
        return cuts[::-1]

    def _fewest(self, stage: int) -> int:
        return 0 if self.empty and stage < len(self.pinned) - 1 else 1

    def _possible(self, earliest: Sequence[Earliest]) -> bool:
        ends = [True, *[False] * self.n]  # where the runs so far may end
        for stage, pinned in enumerate(self.pinned):
            count_below = [0, *accumulate(ends)]  # count_below[i]: how many ends lie below i
            fewest = self._fewest(stage)
            ends = [
                count_below[max(end + 1 - fewest, 0)] > count_below[max(begins)]
                for end, begins in enumerate(zip(earliest[stage], pinned, strict=True))
            ]
        return ends[self.n]

    def _next(
        self, best: Sequence[int | None], stage: int, earliest: Earliest, pinned: Earliest, cost: Sequence[int]
    ) -> tuple[list[int | None], list[int]]:
        """For each end: the smallest cost with one more run, and the begin of that run (-1 if no run can end there)."""
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


__all__ = ["CutPlans", "Earliest"]
