"""Regions: where branches part from the trunk and where they meet it again, read from a recorded forward.

    position   0    1        2         3         4
    event      emb  a.fc1    a.fc2     b.fc      add
    place      0    1        1         2         0
                    fork: what branches take of the trunk
                                                 join: what others take of a branch

A region begins with the first event of a branch and ends as late as it can: before the first event that takes a value
of a branch which is not its own. What the branches take of the trunk is *forked*, together, before the first of them
that takes it; what others take of a branch is *joined*, together, at the end. Every rank of the place around a region
comes to its forks and joins in the order of the program, whether or not it is of a branch in it.

An event that no module of a branch holds is the branch's all the same, if it needs nothing but what the branch has: a
plain function without parameters, between the modules of a branch or after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.graph import ROOT, Event, ModelGraph
from meshwright.place import Places

Placed = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fork:
    """At ``position``, values of a place become values that its branches compute with."""

    position: int
    around: int
    values: tuple[int, ...]
    takers: Mapping[int, frozenset[int]]  # value → the branches that take it


@dataclass(frozen=True)
class Join:
    """At ``position``, values of branches become values of the place around them.

    ``first``: the region's first event; ``values``: (value, the branch it is of), in a fixed order; ``takers``: the branches
    that take a value, where nothing else does; ``branches``: all of the region.
    """

    first: int
    position: int
    around: int
    values: tuple[tuple[int, int], ...]
    takers: Mapping[int, frozenset[int]]
    branches: tuple[int, ...]


@dataclass
class _Open:
    """A region that has begun."""

    branches: dict[int, int] = field(default_factory=dict)  # in the order they begin, with where
    made: dict[int, int] = field(default_factory=dict)  # value → the branch that has it
    forked: dict[int, set[int]] = field(default_factory=dict)  # value → the branches that take it
    fork_at: dict[int, int] = field(default_factory=dict)  # value → position


@dataclass(frozen=True)
class Regions:
    """The place of each event, and the forks and joins in the order in which they run."""

    places: tuple[int, ...]
    moves: tuple[Fork | Join, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """From the first event of each region to its join."""
        return [(m.first, m.position) for m in self.moves if isinstance(m, Join)]

    def alone(self) -> dict[int, Join]:
        """Branches that run in no region with another: the last join of each."""
        found: dict[int, Join] = {}
        joins = [m for m in self.moves if isinstance(m, Join)]
        together = {b for j in joins if len(j.branches) > 1 for b in j.branches}
        for join in joins:
            for branch in join.branches:
                if branch not in together:
                    found[branch] = join
        return found


def find_regions(
    graph: ModelGraph,
    placed: Placed,
    places: Places,
    start: int = 0,
    stop: int | None = None,
    *,
    whole_output: bool = False,
) -> Regions:
    """The regions of a forward, or of the stage of it that runs from ``start`` to ``stop``.

    Args:
        placed: module → the places of its calls, in turn.
        whole_output: whether all that the model returns is wanted on every rank, and not the loss alone.
    """
    stop = len(graph.events) if stop is None else stop
    at = place_events(graph, placed, places)
    moves: list[Fork | Join] = []
    outputs = {*graph.returned, *(n for n in graph.calls[ROOT].outputs if n is not None and whole_output)}
    depth = {around: len(places.chain(around)) for around in {places[p].parent for p in set(at) if p}}
    for around in sorted(depth, key=lambda a: (depth[a], a)):
        # Where a region ends, those within its branches do.
        ends = {m.position for m in moves if isinstance(m, Join) and m.around in places.chain(around)}
        moves += _regions_in(graph, at, places, around, start, stop, ends, outputs)
    # At one position: joins before forks, the innermost first; forks from the outermost in.
    moves.sort(key=lambda m: (m.position, isinstance(m, Fork), depth[m.around] * (1 if isinstance(m, Fork) else -1)))
    return Regions(tuple(at), tuple(moves))


def place_events(graph: ModelGraph, placed: Placed, places: Places) -> list[int]:
    """The place of each event."""
    at = [0] * len(graph.events)
    fixed = [False] * len(graph.events)
    calls: dict[str, int] = {}
    for call in sorted(graph.calls.values(), key=lambda c: (c.start, -c.stop)):
        if call.module in placed:
            turns, turn = placed[call.module], calls.get(call.module, 0)
            calls[call.module] = turn + 1
            for p in range(call.start, call.stop):
                at[p], fixed[p] = turns[min(turn, len(turns) - 1)], True
    made: dict[int, int] = {}
    end = graph.calls[ROOT].stop
    for p, event in enumerate(graph.events):
        if not fixed[p] and p < end:
            at[p] = _absorbed(event, made, places, at, graph)
        for n in (*event.outputs, event.written):
            if n is not None:
                made[n] = at[p]
    return at


def _absorbed(event: Event, made: Mapping[int, int], places: Places, at: list[int], graph: ModelGraph) -> int:
    """The place of an event that no placed module holds."""
    homes = {made.get(n, 0) for n in event.inputs}
    if event.reads or event.parameters or event.buffers or not homes:
        return 0
    branches = homes - {0}
    if event.written is not None and made.get(event.inputs[0], 0) not in branches:
        return 0
    chains = [places.chain(p) for p in branches]
    if not chains:
        return 0
    longest = max(chains, key=len)
    found = longest[-1] if all(longest[: len(c)] == c for c in chains) else _common(chains)
    return 0 if any(places[p].splits for p in places.chain(found)) else found


def _common(chains: list[tuple[int, ...]]) -> int:
    """The innermost place around several."""
    shared = 0
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        shared = level[0]
    return shared


def _regions_in(
    graph: ModelGraph,
    at: list[int],
    places: Places,
    around: int,
    start: int,
    stop: int,
    ends: set[int],
    outputs: set[int],
) -> list[Fork | Join]:
    """The forks and joins between a place and its branches.

    Args:
        ends: positions at which a region ends in any case.
        outputs: values that are wanted after the forward.
    """
    inside = [around in places.chain(p) for p in range(len(places))]
    moves: list[Fork | Join] = []
    region = _Open()
    last = min(stop, graph.calls[ROOT].stop)

    def takers_of(number: int, position: int) -> frozenset[int] | None:
        """The branches that take a value from a position on; None where others do too."""
        at_ = [p for p in graph.consumers.get(number, ()) if p >= position]
        if number in outputs or any(p >= last or not inside[at[p]] or at[p] == around for p in at_):
            return None
        return frozenset(places.child(at[p], around) for p in at_)

    def close(position: int) -> None:
        nonlocal region
        joined = [(n, b) for n, b in region.made.items() if _used_after(graph, n, position, outputs)]
        by_position: dict[int, list[int]] = {}
        for n, p in region.fork_at.items():
            by_position.setdefault(p, []).append(n)
        for p, numbers in sorted(by_position.items()):
            takers = {n: frozenset(region.forked[n]) for n in numbers}
            moves.append(Fork(p, around, tuple(sorted(numbers)), takers))
        if region.branches:
            takers = {n: found for n, _ in joined if (found := takers_of(n, position)) is not None}
            begun = min(region.branches.values())
            moves.append(Join(begun, position, around, tuple(sorted(joined)), takers, tuple(region.branches)))
        region = _Open()

    for p in range(start, min(stop, len(graph.events))):
        event, place = graph.events[p], at[p]
        own = places.child(place, around) if inside[place] and place != around else None
        needs = {region.made[n] for n in event.inputs if n in region.made}
        if needs - {own} or p in ends:
            close(p)
        if own is None:
            continue
        region.branches.setdefault(own, p)
        for n in event.inputs:
            if n not in region.made:
                region.forked.setdefault(n, set()).add(own)
                region.fork_at.setdefault(n, _first_fork(region, graph, n, p))
        region.made |= {n: own for n in (*event.outputs, event.written) if n is not None}
    if region.branches:
        close(last)
    return moves


def _first_fork(region: _Open, graph: ModelGraph, number: int, position: int) -> int:
    """With the first fork of the region after the value is there."""
    made = graph.values[number].position
    return min((p for p in region.fork_at.values() if p > made), default=position)


def _used_after(graph: ModelGraph, number: int, position: int, outputs: set[int]) -> bool:
    return number in outputs or any(p >= position for p in graph.consumers.get(number, ()))


__all__ = ["Fork", "Join", "Placed", "Regions", "find_regions", "place_events"]
