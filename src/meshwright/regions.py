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
plain function without parameters, between the modules of a branch or after them. So is one that takes values of several
branches and whose result a single one takes: two tracks that exchange what they have send it to each other, and to none else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.graph import ROOT, Event, ModelGraph
from meshwright.place import Places

Placed = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fork:
    """At ``position``, values of a place become values that its branches compute with.

    ``takers``: value → the branches that take it; ``homes``: value → the other branch that made it, and alone needs its
    gradient.
    """

    position: int
    around: int
    values: tuple[int, ...]
    takers: Mapping[int, frozenset[int]]
    homes: Mapping[int, int]


@dataclass(frozen=True)
class Join:
    """At ``position``, values of branches become values of the place around them.

    ``first``: the region's first event; ``values``: (value, the branch it is of), in a fixed order; ``takers``: the other
    branches that take a value, where nothing else does; ``kept``: values that their own branch goes on with, as it has them;
    ``branches``: all of the region.
    """

    first: int
    position: int
    around: int
    values: tuple[tuple[int, int], ...]
    takers: Mapping[int, frozenset[int]]
    kept: frozenset[int]
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


@dataclass(frozen=True)
class Return:
    """Rows of a gradient that go back to a rank of the branch that made the value; all of them where ``stop`` is None."""

    sender: int
    receiver: int
    start: int
    stop: int | None


Shares = Sequence[tuple[int, int]] | None
"""The rows that each share of a branch has; None where each of its ranks has all."""


def parts(members: Sequence[int], shares: Shares) -> list[tuple[int, int | None, tuple[int, ...]]]:
    """(first row, last, the ranks that have them) for each part of a value that a branch has.

    Args:
        members: for each rank of the line around, its share; -1: it is not of the branch.
    """
    if shares is None:
        return [(0, None, tuple(r for r, s in enumerate(members) if s >= 0))]
    return [
        (start, stop, tuple(r for r, s in enumerate(members) if s == share))
        for share, (start, stop) in enumerate(shares)
    ]


def returns(home: Sequence[int], taker: Sequence[int], rows: Shares, taken: Shares) -> list[Return]:
    """Who sends the gradient of a value, from the branch that took it to each rank of the one that made it: of ranks that
    have the same, one.

    Args:
        home, taker: the members of both, as of ``parts``.
        rows, taken: the rows that their shares have.
    """
    found = []
    for first, last, group in parts(taker, taken):
        for start, stop, owners in parts(home, rows):
            if stop is not None and last is not None and not max(start, first) < min(stop, last):
                continue
            found += [Return(r if r in group else group[r % len(group)], r, start, stop) for r in owners]
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
    _hand_on(graph, at, fixed, places)
    return at


def _hand_on(graph: ModelGraph, at: list[int], fixed: Sequence[bool], places: Places) -> None:
    """What is made of several branches' values, or of such, becomes a branch's if that alone takes it; and so does what
    another branch made of its own, if it is no work and makes no less of it."""
    end = graph.calls[ROOT].stop
    written = {graph.values[e.written].storage for e in graph.events if e.written is not None}
    free = [not f and _is_free(e, graph, written) for f, e in zip(fixed[:end], graph.events, strict=False)]
    maker = {n: value.position for n, value in enumerate(graph.values)}
    mixed = [False] * end
    for p in range(end):
        makers = {maker[n] for n in graph.events[p].inputs}
        several = len({at[q] for q in makers} - {*places.chain(at[p])}) > 1
        mixed[p] = free[p] and (several or any(mixed[q] and at[q] == at[p] for q in makers if q < p))
    outside = {*graph.returned, *graph.calls[ROOT].outputs}
    for p in range(end - 1, -1, -1):
        inputs, made = graph.events[p].inputs, [n for n in graph.events[p].outputs if n is not None]
        takers = {at[q] for n in made for q in graph.consumers.get(n, ())}
        if not free[p] or len(takers) != 1 or outside.intersection(made):
            continue
        (taker,) = takers
        homes = {at[maker[n]] for n in inputs}
        if taker == at[p] or any(places[q].splits for h in (taker, *homes) for q in places.chain(h)):
            continue
        around = at[p] in places.chain(taker)
        beside = not around and taker not in places.chain(at[p]) and homes == {at[p]}
        light = not graph.events[p].flops and _bytes(graph, made) >= _bytes(graph, inputs)
        if (mixed[p] and around) or (beside and light):
            at[p] = taker


def _is_free(event: Event, graph: ModelGraph, written: set[int]) -> bool:
    """Whether it does not matter where an event runs: it needs nothing but values, in memory that nothing writes to."""
    bound = event.reads or event.mean_loss or event.parameters or event.buffers or not event.inputs
    memories = {graph.values[n].storage for n in (*event.inputs, *event.outputs, event.written) if n is not None}
    return not bound and not memories & written


def _bytes(graph: ModelGraph, numbers: Iterable[int]) -> int:
    return sum(graph.values[n].bytes for n in set(numbers))


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
    homes: dict[int, int] = {}  # value → the branch that made it
    last = min(stop, graph.calls[ROOT].stop)

    def takers_of(number: int, position: int) -> frozenset[int] | None:
        """The branches that take a value from a position on; None where others do too."""
        at_ = [p for p in graph.consumers.get(number, ()) if p >= position]
        if number in outputs or any(p >= last or not inside[at[p]] or at[p] == around for p in at_):
            return None
        return taking(number, position)

    def taking(number: int, position: int) -> frozenset[int]:
        """The branches that take a value from a position on, in this stage."""
        at_ = [p for p in graph.consumers.get(number, ()) if position <= p < last]
        return frozenset(places.child(at[p], around) for p in at_ if inside[at[p]] and at[p] != around)

    def close(position: int) -> None:
        nonlocal region
        used = {n: b for n, b in region.made.items() if _used_after(graph, n, position, outputs)}
        takers = {n: found - {b} for n, b in used.items() if (found := takers_of(n, position)) is not None}
        joined = [(n, b) for n, b in used.items() if takers.get(n) != frozenset()]
        by_position: dict[int, list[int]] = {}
        for n, p in region.fork_at.items():
            by_position.setdefault(p, []).append(n)
        for p, numbers in sorted(by_position.items()):
            forked = {n: frozenset(region.forked[n]) for n in numbers}
            given = {n: homes[n] for n in numbers if n in homes}
            moves.append(Fork(p, around, tuple(sorted(numbers)), forked, given))
        if region.branches:
            apart = {n: takers[n] for n, _ in joined if n in takers}
            kept = frozenset(n for n, b in joined if b in taking(n, position))
            begun = min(region.branches.values())
            moves.append(Join(begun, position, around, tuple(sorted(joined)), apart, kept, tuple(region.branches)))
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
            if n not in region.made and homes.get(n) != own:
                region.forked.setdefault(n, set()).add(own)
                region.fork_at.setdefault(n, _first_fork(region, graph, n, p))
        made = {n: own for n in (*event.outputs, event.written) if n is not None}
        region.made |= made
        homes |= made
    if region.branches:
        close(last)
    return moves


def _first_fork(region: _Open, graph: ModelGraph, number: int, position: int) -> int:
    """With the first fork of the region after the value is there."""
    made = graph.values[number].position
    return min((p for p in region.fork_at.values() if p > made), default=position)


def _used_after(graph: ModelGraph, number: int, position: int, outputs: set[int]) -> bool:
    return number in outputs or any(p >= position for p in graph.consumers.get(number, ()))


__all__ = ["Fork", "Join", "Placed", "Regions", "Return", "find_regions", "parts", "place_events", "returns"]
