"""``Calls``: counts of functions and collectives. Their sizes are linear in the rows of a microbatch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshwright.hardware.collectives import CollectiveKind, collective, neighbours
from meshwright.hardware.profile import CallKind, Profile

Line = tuple[float, float]
"""(a, b) stands for a + b · rows."""
OpKey = tuple[CallKind, str, Line, Line]
"""(kind, dtype, operations, bytes)"""
ExchangeKey = tuple[CollectiveKind, int, Line]
"""(kind, ranks, bytes)"""
K = TypeVar("K", OpKey, ExchangeKey)


@dataclass(frozen=True)
class Calls:
    """Counts of functions and collectives.

    Attributes:
        ops: (kind, dtype, operations, bytes) → number of calls; operations and bytes are lines.
        exchanges: (kind, ranks, bytes) → number of calls; bytes are a line.
    """

    ops: Mapping[OpKey, float]
    exchanges: Mapping[ExchangeKey, float]

    def __add__(self, other: Calls) -> Calls:
        return Calls(_added(self.ops, other.ops, 1), _added(self.exchanges, other.exchanges, 1))

    def __sub__(self, other: Calls) -> Calls:
        return Calls(_added(self.ops, other.ops, -1), _added(self.exchanges, other.exchanges, -1))

    def times(self, number: float) -> Calls:
        """All counts, multiplied by ``number``."""
        return Calls(_added({}, self.ops, number), _added({}, self.exchanges, number))

    @property
    def count(self) -> float:
        """The number of function calls."""
        return sum(self.ops.values())

    @property
    def collectives(self) -> float:
        """The number of collectives between several ranks."""
        return sum(n for (_, ranks, _), n in self.exchanges.items() if ranks > 1)

    @property
    def flops(self) -> float:
        """Floating-point operations with one row."""
        return sum(n * line_value(flops, 1) for (_, _, flops, _), n in self.ops.items())

    def host(self, profile: Profile, seconds: float) -> float:
        """Seconds of the host. ``seconds``: of the host for each function."""
        return self.count * seconds + self.collectives * profile.host_collective

    def device(self, profile: Profile, rows: float, only: Collection[CallKind] | None = None) -> float:
        """Seconds on the device. ``only``: count only functions of these kinds."""
        return sum(
            n * profile.compute(line_value(flops, rows), line_value(moved, rows), dtype, kind).seconds
            for (kind, dtype, flops, moved), n in self.ops.items()
            if any((*flops, *moved)) and (only is None or kind in only)  # else no kernel runs
        )

    def exchange(self, profile: Profile, rows: float) -> float:
        """Seconds of collectives over tp. Ranks of a tp group are neighbours."""
        return sum(
            n * collective(profile, kind, round(line_value(nbytes, rows)), neighbours(profile, ranks)).seconds
            for (kind, ranks, nbytes), n in self.exchanges.items()
            if ranks > 1
        )


NO_CALLS = Calls({}, {})


def line_value(line: Line, number: float) -> float:
    """The value of a line at ``number`` rows, at least 0.0."""
    return max(0.0, line[0] + line[1] * number)


def _added(one: Mapping[K, float], other: Mapping[K, float], times: float) -> dict[K, float]:
    """one + times · other, without the keys whose sum is not positive."""
    total = dict(one)
    for key, number in other.items():
        total[key] = total.get(key, 0.0) + times * number
    return {key: number for key, number in total.items() if number > 1e-9}
