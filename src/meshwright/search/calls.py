"""``Calls``: functions and collectives, counted; their sizes are lines in the rows of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshwright.graph import INTENSITY
from meshwright.hardware.collectives import CollectiveKind, collective, neighbours
from meshwright.hardware.profile import Profile, Work

Line = tuple[float, float]
"""(a, b): a + b · rows"""
OpKey = tuple[Work, str, Line, Line]
"""(kind, dtype, operations, bytes)"""
ExchangeKey = tuple[CollectiveKind, int, Line]
"""(kind, ranks, bytes)"""
K = TypeVar("K", OpKey, ExchangeKey)


@dataclass(frozen=True)
class Calls:
    """Functions and collectives, counted: (what, its sizes as lines) → how often."""

    ops: Mapping[OpKey, float]
    exchanges: Mapping[ExchangeKey, float]

    def __add__(self, other: Calls) -> Calls:
        return Calls(_added(self.ops, other.ops, 1), _added(self.exchanges, other.exchanges, 1))

    def __sub__(self, other: Calls) -> Calls:
        return Calls(_added(self.ops, other.ops, -1), _added(self.exchanges, other.exchanges, -1))

    def times(self, number: float) -> Calls:
        """So many of these."""
        nothing = NO_CALLS
        return Calls(_added(nothing.ops, self.ops, number), _added(nothing.exchanges, self.exchanges, number))

    @property
    def count(self) -> float:
        """Functions."""
        return sum(self.ops.values())

    def host(self, profile: Profile, seconds: float) -> float:
        """Seconds of a host that takes so many for a function."""
        moved = sum(n for (_, ranks, _), n in self.exchanges.items() if ranks > 1)
        return self.count * seconds + moved * profile.host_collective

    def work(self, rows: float) -> float:
        """Operations and bytes, as planning weighs them when it cuts stages (``graph.Event.work``)."""
        return sum(n * (at(flops, rows) + INTENSITY * at(moved, rows)) for (_, _, flops, moved), n in self.ops.items())

    def device(self, profile: Profile, rows: float, only: Work | None = None) -> float:
        """Seconds on the device. ``only``: of work of this kind."""
        return sum(
            n * profile.compute(at(flops, rows), at(moved, rows), dtype, kind).seconds
            for (kind, dtype, flops, moved), n in self.ops.items()
            if any((*flops, *moved)) and only in (None, kind)  # else no kernel runs
        )

    def exchange(self, profile: Profile, rows: float) -> float:
        """Seconds of collectives over tp, whose ranks are neighbours."""
        return sum(
            n * collective(profile, kind, round(at(nbytes, rows)), neighbours(profile, ranks)).seconds
            for (kind, ranks, nbytes), n in self.exchanges.items()
            if ranks > 1
        )


NO_CALLS = Calls({}, {})


def at(line: Line, number: float) -> float:
    """The line's value, not below zero."""
    return max(0.0, line[0] + line[1] * number)


def _added(one: Mapping[K, float], other: Mapping[K, float], times: float) -> dict[K, float]:
    """One and so many times the other; nothing below zero."""
    found = dict(one)
    for key, number in other.items():
        found[key] = found.get(key, 0.0) + times * number
    return {key: number for key, number in found.items() if number > 1e-9}
