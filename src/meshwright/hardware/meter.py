"""``Meter``: times calls of growing size, and makes an efficiency curve from their times.

The highest rate of all calls is the peak; the efficiency of a size is its call's rate divided by the peak. The clock is CPU
time
of the measuring thread: it stops while the thread waits for a core, so that other programs on the machine count less. They
still share memory bandwidth and caches with the measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Context
from itertools import accumulate
from math import hypot, log
from typing import TypeAlias

from meshwright.hardware.profile import Curve

Calls: TypeAlias = Iterable[tuple[float, list[Callable[[], Callable[[], object]]]]]
"""(size, factories of calls) from small to large sizes. A factory makes a call of this size; there is one for each shape.
It is called just before its call is timed, because the tensors of the largest calls need much memory."""

ROUND = 2e-4  # least seconds of a round: a short call is repeated within a round
LEAST = 0.02  # lower bound of the scatter


@dataclass
class Meter:
    """Times calls, and records how much their times scatter.

    Attributes:
        rounds: how often each call is timed.
        budget: seconds for one curve. Sizes that would exceed the budget are left out.
        host: the host's seconds of a call. They are subtracted, because a profile has them as a field of its own.
    """

    rounds: int
    budget: float
    host: float = 0.0
    repeats: list[float] = field(default_factory=list)  # relative deviations between rounds of one call
    shapes: list[float] = field(default_factory=list)  # relative deviations between calls of one size in several shapes

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one call: the median of all rounds, after a warm-up call."""
        run()
        calls = max(1, int(ROUND / max(timed(run, 1), 1e-7)))
        times = [timed(run, calls) for _ in range(self.rounds)]
        self.repeats.append(deviation(times))
        return statistics.median(times)

    def points(self, sizes: Calls) -> list[tuple[float, float]]:
        """(size, the mean of the seconds over its shapes) of each size, until the budget is spent."""
        points: list[tuple[float, float]] = []
        until = time.perf_counter() + self.budget
        for size, shapes in sizes:
            began = time.perf_counter()
            seconds = [self.seconds(make()) for make in shapes]
            if len(seconds) > 1:
                self.shapes.append(statistics.pstdev(map(log, seconds)))
            mean = statistics.mean(seconds)
            points.append((size, max(mean - self.host, mean / 2)))
            # The next size takes up to eight times as long.
            if time.perf_counter() + 8 * (time.perf_counter() - began) > until:
                break
        return points

    @property
    def scatter(self) -> float:
        """The relative deviation of all calls so far: between rounds, and between shapes of one size.

        A curve has one efficiency for each size, so shapes of one size cannot be told apart. Of both the median counts: a type
        that the machine has no instructions for deviates many times more than the others.
        """
        shape = statistics.median(self.shapes) if self.shapes else 0.0
        return round(min(1.0, max(LEAST, hypot(statistics.median(self.repeats), shape))), 3)


def timed(run: Callable[[], object], calls: int) -> float:
    """CPU seconds of this thread for one call: the mean of ``calls`` calls."""
    began = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - began) / calls


def deviation(times: Sequence[float]) -> float:
    """The relative standard deviation of times, estimated from the median absolute deviation, which outliers hardly change."""
    middle = statistics.median(times)
    return 1.4826 * statistics.median(abs(t - middle) for t in times) / middle if middle else 0.0


def monotone_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points sorted by size. Seconds are lowered so that no size takes longer than a larger one.

    Disturbances can only add time, so the smaller of both times is the better one.
    """
    ordered = sorted(points)
    least = list(accumulate((seconds for _, seconds in reversed(ordered)), min))[::-1]
    return [(size, seconds) for (size, _), seconds in zip(ordered, least, strict=True)]


def rate(points: Sequence[tuple[float, float]], least: float = 0.0) -> float:
    """The highest size / seconds of all points with at least ``least`` seconds: in a shorter call the host takes too much.

    If no point takes so long, the rate of the largest size. The rate is rounded down to four digits, so that the fastest call
    attains all of it (efficiency 1).
    """
    ordered = monotone_points(points)
    clear = [(size, seconds) for size, seconds in ordered if seconds >= least] or ordered[-1:]
    highest = max(size / seconds for size, seconds in clear)
    return float(Context(prec=4, rounding=ROUND_FLOOR).create_decimal(highest))


def curve(points: Sequence[tuple[float, float]], peak: float) -> Curve:
    """The efficiency of each size: its rate as a fraction of ``peak``, at most 1."""
    return Curve(
        tuple((size, four_digits(min(1.0, size / seconds / peak))) for size, seconds in monotone_points(points))
    )


def four_digits(value: float) -> float:
    """The value rounded to four significant digits."""
    return float(f"{value:.4g}")
