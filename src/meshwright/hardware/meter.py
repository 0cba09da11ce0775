"""Timing calls, and what a curve makes of it.

A curve is made of calls of growing size. The highest rate of them is the peak, and each call's rate over it the efficiency of
its size. The clock is that of the measuring thread, which stands while the thread waits for a core: what else runs on the
machine is not its rate. Memory bandwidth and caches are shared with it all the same.
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
"""Sizes from small to large, each with what makes a call of this size, for each shape that has it. They are made when it is
their turn, since the largest take memory."""

ROUND = 2e-4  # seconds that a round takes at least: short calls are repeated
LEAST = 0.02  # scatter that is assumed in any case


@dataclass
class Meter:
    """Times calls, and keeps how much they scatter.

    Attributes:
        rounds: how often each call is timed.
        budget: seconds for one curve; sizes that would exceed it are left out.
        host: seconds of a call that are not the device's, since a profile counts them by themselves.
    """

    rounds: int
    budget: float
    host: float = 0.0
    repeats: list[float] = field(default_factory=list)  # relative deviations of one call
    shapes: list[float] = field(default_factory=list)  # and of calls of the same size in another shape

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of some rounds, after a call that warms up."""
        run()
        calls = max(1, int(ROUND / max(timed(run, 1), 1e-7)))
        times = [timed(run, calls) for _ in range(self.rounds)]
        self.repeats.append(deviation(times))
        return statistics.median(times)

    def points(self, sizes: Calls) -> list[tuple[float, float]]:
        """(size, seconds) of growing sizes, each the mean of its shapes, but for those that would exceed the budget."""
        points: list[tuple[float, float]] = []
        until = time.perf_counter() + self.budget
        for size, shapes in sizes:
            began = time.perf_counter()
            seconds = [self.seconds(make()) for make in shapes]
            if len(seconds) > 1:
                self.shapes.append(log(max(seconds) / min(seconds)) / 2)
            mean = statistics.mean(seconds)
            points.append((size, max(mean - self.host, mean / 2)))
            # The next size takes up to eight times as long.
            if time.perf_counter() + 8 * (time.perf_counter() - began) > until:
                break
        return points

    @property
    def scatter(self) -> float:
        """Of repeated calls, and of calls of the same size in another shape, which a curve cannot tell apart."""
        shape = statistics.mean(d**2 for d in self.shapes) ** 0.5 if self.shapes else 0.0
        return round(min(1.0, max(LEAST, hypot(statistics.median(self.repeats), shape))), 3)


def timed(run: Callable[[], object], calls: int) -> float:
    """Seconds of this thread for one call, of some."""
    began = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - began) / calls


def deviation(times: Sequence[float]) -> float:
    """The relative standard deviation, from the median of the deviations, which one outlier does not move."""
    middle = statistics.median(times)
    return 1.4826 * statistics.median(abs(t - middle) for t in times) / middle if middle else 0.0


def steady(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points in the order of their sizes; none takes longer than a larger one, since disturbances only add time."""
    ordered = sorted(points)
    least = list(accumulate((seconds for _, seconds in reversed(ordered)), min))[::-1]
    return [(size, seconds) for (size, _), seconds in zip(ordered, least, strict=True)]


def rate(points: Sequence[tuple[float, float]], least: float = 0.0) -> float:
    """The highest rate of calls that take so many seconds at least; of shorter ones too much is the host's.

    Its digits are rounded down: the call that has this rate attains all of it.
    """
    ordered = steady(points)
    clear = [(size, seconds) for size, seconds in ordered if seconds >= least] or ordered[-1:]
    highest = max(size / seconds for size, seconds in clear)
    return float(Context(prec=4, rounding=ROUND_FLOOR).create_decimal(highest))


def curve(points: Sequence[tuple[float, float]], peak: float) -> Curve:
    """What each size attains of a peak."""
    return Curve(tuple((size, short(min(1.0, size / seconds / peak))) for size, seconds in steady(points)))


def short(value: float) -> float:
    """With the digits that a measurement has."""
    return float(f"{value:.4g}")
