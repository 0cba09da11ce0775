"""Regions: where branches part from the trunk and where they join it again, computed from a recorded forward.

    position   0    1        2         3         4
    event      emb  a.fc1    a.fc2     b.fc      add
    place      0    1        1         2         0
                    fork: branches take values of the trunk
                                                 join: others take values of a branch

(A place is the number of a submesh: 0 is the trunk, the others are branches.)

A region begins with the first event of a branch. It ends before the first event that takes a value of another branch; or as
soon as that value is made, if the branch that made it has other work in between. The values that branches take from the trunk
are *forked* together, as early as possible. The values of branches that others take are *joined* together, at the end. Every
rank of the place around a region performs its forks and joins in the order of the program, whether or not it belongs to one of
the branches.

An event that is in no module of a branch can still belong to the branch. It does if it needs only values that the branch has
before its join: a plain function without parameters, between the modules of a branch or after them. It also does if it takes
values of several branches, and only this branch takes its result: so two tracks that exchange values send them to each other
and to nobody else. If such an event draws random numbers, they are the trunk's, as on one device, and ranks of other branches
draw as many (``StageProgram.shared_draws``). If the number of draws depends on values, which other ranks lack, the event
stays on the trunk.

When Python has read a value on the trunk, the rest of that call may take any path, and is not traced. So the read takes all
values of branches that the rest may take (``ModelGraph.after_reads``), and the rest stays on the trunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.graph import ROOT, Event, ModelGraph
from meshwright.submesh import Submeshes

PlacesOfCalls = Mapping[str, tuple[int, ...]]
"""Module → the places of its calls, in order."""


@dataclass(frozen=True)
class Fork:
    """At ``position``, branches of the place ``around`` get values with which they compute.

    ``takers``: value → the branches that take it. ``homes``: value → the branch that made it, and alone needs its gradient;
    either for all values of a fork or for none.
    """

    position: int
    around: int
    values: tuple[int, ...]
    takers: Mapping[int, frozenset[int]]
    homes: Mapping[int, int]


@dataclass(frozen=True)
class Join:
    """At ``position``, values of branches become values of the place ``around``.

    Attributes:
        first: the first event of the region.
        values: (value, the branch that made it), in a fixed order.
        takers: value → the other branches that take it, for a value that only branches take.
        used_by_maker: values that the branch that made them also takes later: it computes with its own tensor.
        branches: all branches of the region.
    """

    first: int
    position: int
    around: int
    values: tuple[tuple[int, int], ...]
    takers: Mapping[int, frozenset[int]]
    used_by_maker: frozenset[int]
    branches: tuple[int, ...]


@dataclass(frozen=True)
class Regions:
    """The place of each event, and the forks and joins in the order in which they run."""

    places: tuple[int, ...]
    forks_and_joins: tuple[Fork | Join, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first event, position of the join) of each region."""
        return [(m.first, m.position) for m in self.forks_and_joins if isinstance(m, Join)]

    @property
    def spans_of_several(self) -> list[tuple[int, int]]:
        """``spans`` of the regions in which several branches run."""
        return [(m.first, m.position) for m in self.forks_and_joins if isinstance(m, Join) and len(m.branches) > 1]

    def alone(self) -> dict[int, Join]:
        """Branch → its last join, for branches that share no region with another branch."""
        last_joins: dict[int, Join] = {}
        joins = [m for m in self.forks_and_joins if isinstance(m, Join)]
        together = {b for j in joins if len(j.branches) > 1 for b in j.branches}
        for join in joins:
            for branch in join.branches:
                if branch not in together:
                    last_joins[branch] = join
        return last_joins


@dataclass(frozen=True)
class Return:
    """Rows of a gradient that one rank sends to a rank of the branch that made the value; all rows if ``stop`` is None."""

    sender: int
    receiver: int
    start: int
    stop: int | None


RowRanges = Sequence[tuple[int, int]] | None
"""(first row, end) of each share of a branch; None if each of its ranks has all rows."""


def row_parts(members: Sequence[int], shares: RowRanges) -> list[tuple[int, int | None, tuple[int, ...]]]:
    """(first row, end, the ranks that have these rows) for each part of a value of a branch; (0, None, all) if all have all.

    Args:
        members: for each rank of the line around, its share; -1 if it does not belong to the branch.
    """
    if shares is None:
        return [(0, None, tuple(r for r, s in enumerate(members) if s >= 0))]
    return [
        (start, stop, tuple(r for r, s in enumerate(members) if s == share))
        for share, (start, stop) in enumerate(shares)
    ]


def gradient_returns(
    home: Sequence[int], taker: Sequence[int], home_rows: RowRanges, taker_rows: RowRanges
) -> list[Return]:
    """The transfers of a value's gradient from the branch that took the value to each rank of the branch that made it. Of
    several ranks that have the same rows, one sends.

    Args:
        home, taker: ``members`` (see ``row_parts``) of the branch that made it, and of the branch that took it.
        home_rows, taker_rows: the rows of their shares.
    """
    transfers = []
    for first, last, group in row_parts(taker, taker_rows):
        for start, stop, owners in row_parts(home, home_rows):
            if stop is not None and last is not None and not max(start, first) < min(stop, last):
                continue
            transfers += [Return(r if r in group else group[r % len(group)], r, start, stop) for r in owners]
    return transfers


def find_regions(
    graph: ModelGraph,
    placed: PlacesOfCalls,
    places: Submeshes,
    start: int = 0,
    stop: int | None = None,
    *,
    whole_output: bool = False,
) -> Regions:
    """The regions of a forward, or of a stage with the events ``start <= position < stop``.

    Args:
        placed: module → the places of its calls, in order.
        whole_output: whether every rank needs everything that the model returns, not only the loss.
    """
    stop = len(graph.events) if stop is None else stop
    event_places = place_events(graph, placed, places)
    forks_and_joins: list[Fork | Join] = []
    outputs = {*graph.returned, *graph.left}
    outputs |= {n for n in graph.calls[ROOT].outputs if n is not None and whole_output}
    depth = {around: len(places.chain(around)) for around in {places[p].parent for p in set(event_places) if p}}
    wholes, span = _wholes(graph, event_places), (start, min(stop, graph.calls[ROOT].stop))
    for around in sorted(depth, key=lambda a: (depth[a], a)):
        outer = [m for m in forks_and_joins if m.around in places.chain(around)]
        # A region ends all regions within its branches.
        ends = {m.position for m in outer if isinstance(m, Join)}
        forks = [m for m in outer if isinstance(m, Fork)]
        forks_and_joins += _Around(graph, event_places, wholes, places, around, span, ends, forks, outputs).find()

    def in_order(move: Fork | Join) -> tuple[int, bool, int]:
        # At one position: joins before forks; joins from the innermost out, forks from the outermost in.
        is_fork = isinstance(move, Fork)
        return move.position, is_fork, depth[move.around] if is_fork else -depth[move.around]

    return Regions(tuple(event_places), tuple(sorted(forks_and_joins, key=in_order)))


def cross_places(graph: ModelGraph, values: Iterable[int], event_places: Sequence[int]) -> list[tuple[int, int]]:
    """(value, position of a use) for those of ``values`` that are made in one place and used in another. The trunk uses what
    the model returns, or leaves in its arguments; the position is that of the last event."""
    outputs, crossing = {*graph.returned, *graph.calls[ROOT].outputs, *graph.left}, []
    for n in sorted(values):
        maker = graph.values[n].position
        crossing += [(n, p) for p in graph.consumers.get(n, ()) if event_places[p] != event_places[maker]]
        if n in outputs and event_places[maker]:
            crossing.append((n, len(event_places) - 1))
    return crossing


def place_events(graph: ModelGraph, placed: PlacesOfCalls, places: Submeshes) -> list[int]:
    """The place of each event."""
    event_places = [0] * len(graph.events)
    fixed = [False] * len(graph.events)
    calls: dict[str, int] = {}
    for node in graph.hook_nodes:  # one node of autograd, which is not divided
        for p in range(node[0], node[1] + 1):
            fixed[p] = True
    for call in sorted(graph.calls.values(), key=lambda c: (c.start, -c.stop)):
        if call.module in placed:
            turns, turn = placed[call.module], calls.get(call.module, 0)
            calls[call.module] = turn + 1
            first, last = graph.with_hook_nodes(call)
            for p in range(first, last + 1):
                event_places[p], fixed[p] = turns[min(turn, len(turns) - 1)], True
    value_place: dict[int, int] = {}
    joins_before: dict[int, int] = {}  # value → at least so many joins come before it
    end, untraced = graph.calls[ROOT].stop, 0  # the end of a call of the trunk in which Python has read a value
    for p, event in enumerate(graph.events):
        if p in graph.after_reads and not event_places[p]:
            untraced = max(untraced, graph.calls[event.path].stop)
        if not fixed[p] and untraced <= p < end:
            event_places[p] = _absorbed(p, value_place, joins_before, places, graph)
        around = places.chain(event_places[p])
        after = max((joins_before.get(n, 0) + (value_place.get(n, 0) not in around) for n in event.inputs), default=0)
        value_place |= dict.fromkeys(graph.values_made_by(p), event_places[p])
        joins_before |= dict.fromkeys(graph.values_made_by(p), after)
    _move_to_takers(graph, event_places, fixed, places)
    return event_places


def _move_to_takers(graph: ModelGraph, event_places: list[int], fixed: Sequence[bool], places: Submeshes) -> None:
    """Moves events to the branch that alone takes their results.

    Two kinds of events are moved: those that take values of several branches, or depend on such events; and events of another
    branch without floating-point operations whose results are not smaller than their inputs.
    """
    end = graph.calls[ROOT].stop
    written = {graph.values[e.written].storage for e in graph.events if e.written is not None}
    free = [not f and _is_free(e, graph, written) for f, e in zip(fixed[:end], graph.events, strict=False)]
    maker = {n: value.position for n, value in enumerate(graph.values)}
    mixed = [False] * end
    for p in range(end):
        makers = {maker[n] for n in graph.events[p].inputs}
        several = len({event_places[q] for q in makers} - {*places.chain(event_places[p])}) > 1
        mixed[p] = free[p] and (
            several or any(mixed[q] and event_places[q] == event_places[p] for q in makers if q < p)
        )
    outside = {*graph.returned, *graph.calls[ROOT].outputs, *graph.left}
    for p in range(end - 1, -1, -1):
        inputs, results = graph.events[p].inputs, graph.values_made_by(p)
        takers = {event_places[q] for n in results for q in graph.consumers.get(n, ())}
        if not free[p] or len(takers) != 1 or outside.intersection(results):
            continue
        (taker,) = takers
        homes = {event_places[maker[n]] for n in inputs}
        if taker == event_places[p] or (p not in graph.by_rows and any(_splits(places, h) for h in (taker, *homes))):
            continue
        around = event_places[p] in places.chain(taker)
        beside = not around and taker not in places.chain(event_places[p]) and homes == {event_places[p]}
        light = not graph.events[p].flops and _bytes(graph, results) >= _bytes(graph, inputs)
        if (mixed[p] and around) or (beside and light):
            event_places[p] = taker


def _is_free(event: Event, graph: ModelGraph, written: set[int]) -> bool:
    """Whether an event may run on any rank: it needs only values, in memory to which nothing writes."""
    memories = {graph.values[n].storage for n in (*event.inputs, *event.outputs, event.written) if n is not None}
    return event.plain and not event.draws_by_values and not memories & written


def _bytes(graph: ModelGraph, numbers: Iterable[int]) -> int:
    return sum(graph.values[n].bytes for n in set(numbers))


def _absorbed(
    position: int, home_of: Mapping[int, int], joins: Mapping[int, int], places: Submeshes, graph: ModelGraph
) -> int:
    """The place of an event that is in no placed module.

    Args:
        home_of: value → the place that made it.
        joins: value → at least so many joins come before it.
    """
    event = graph.events[position]
    homes = {home_of.get(n, 0) for n in event.inputs}
    if event.reads or event.parameters or event.buffers or event.draws_by_values or not homes:
        return 0
    branches = homes - {0}
    if (overwritten := graph.overwritten(event)) is not None and home_of.get(overwritten, 0) not in branches:
        return 0
    chains = [places.chain(p) for p in branches]
    if not chains:
        return 0
    longest = max(chains, key=len)
    place = longest[-1] if all(longest[: len(c)] == c for c in chains) else _common(chains)
    around = [n for n in event.inputs if home_of.get(n, 0) in places.chain(place)[:-1]]
    join = max(joins.get(n, 0) for n in event.inputs if n not in around)
    late = [home_of.get(n, 0) for n in around if joins.get(n, 0) > join]
    if late:  # the event comes after the join, and would need another one
        place = max(late, key=lambda p: len(places.chain(p)))
    return place if position in graph.by_rows or not _splits(places, place) else 0


def _splits(places: Submeshes, place: int) -> bool:
    """Whether ranks of a place run only some of the rows."""
    return any(places[p].splits for p in places.chain(place))


def _common(chains: list[tuple[int, ...]]) -> int:
    """The innermost place that contains several places, given as chains from the trunk inwards."""
    shared = 0
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        shared = level[0]
    return shared


class _Around:
    """Finds the regions of the branches of one place, ``around``.

    Args:
        event_places: the place of each event.
        wholes: see ``_wholes``.
        span: the events to look at: (first, end).
        ends: positions at which a region ends in any case.
        forks: the forks of places around, which give this place its values.
        outputs: values that are needed after the forward.
    """

    def __init__(
        self,
        graph: ModelGraph,
        event_places: Sequence[int],
        wholes: Sequence[int],
        places: Submeshes,
        around: int,
        span: tuple[int, int],
        ends: set[int],
        forks: Sequence[Fork],
        outputs: set[int],
    ) -> None:
        self.graph, self.wholes, self.around = graph, wholes, around
        self.ends, self.forks, self.outputs = ends, forks, outputs
        # A read takes what the rest of its call may take: that is not traced. (A value whose size follows from values crosses
        # only if the recorded rest takes it: only then has planning looked whether it can.)
        sized = graph.sized | graph.sized_by_model
        self.inputs = [e.inputs for e in graph.events]
        for p, numbers in graph.after_reads.items():
            self.inputs[p] += tuple(n for n in sorted(numbers) if n not in sized or graph.consumers.get(n, [0])[-1] > p)
        self.takers: dict[int, list[int]] = {}
        for p, inputs in enumerate(self.inputs):
            for n in inputs:
                self.takers.setdefault(n, []).append(p)
        inside = [around in places.chain(p) for p in range(len(places))]
        # For each event its branch; None: the event belongs to the place itself, or is outside of it.
        self.branch = [places.child(p, around) if inside[p] and p != around else None for p in event_places]
        self.first, self.last = span  # ``first``: where the current region begins
        self.homes: dict[int, int] = {}  # value → the branch that made it, in an earlier region
        self.forked: set[int] = set()  # values that have been forked, once for all later takers
        self.forks_and_joins: list[Fork | Join] = []

    def find(self) -> list[Fork | Join]:
        """The forks and joins, in the order of the program."""
        branch_of: dict[int, int] = {}  # value → the branch that made it, in this region
        p = self.first
        while p < self.last:
            branch = self.branch[p]
            tied = any(branch_of.get(n, branch) != branch for n in self.inputs[p])
            if tied or p in self.ends:
                p = self._end(p, branch_of) if tied and p not in self.ends else p
                self._close(p)
                branch_of = {}
                branch = self.branch[p]
            if branch is not None:
                branch_of |= dict.fromkeys(self.graph.values_made_by(p), branch)
            p += 1
        self._close(self.last)
        return self.forks_and_joins

    def _end(self, position: int, branch_of: Mapping[int, int]) -> int:
        """Where a region ends, if the event at ``position`` takes values that other branches made in it.

        At ``position``; or as soon as all such values are made, if a branch that made them has other work in between. That
        work then runs at the same time as the events that take the values.
        """
        events, branch, needs = self.graph.events, self.branch[position], set[int]()
        stop, worked = position, False
        for p in range(position, self.last):
            if self.branch[p] == branch:
                if p >= stop and worked:
                    break
                stop = max(stop, self.wholes[p])  # an untraced call begins when all its values are there
                worked = worked or bool(events[p].flops)
                needs |= {n for n in self.inputs[p] if branch_of.get(n, branch) != branch}
        end = max(self._ready(n) for n in needs)
        homes = {branch_of[n] for n in needs}
        beside = any(events[p].flops and self.branch[p] in homes for p in range(end, position))
        return end if beside else position

    def _ready(self, number: int) -> int:
        """The first position at which a value is available."""
        return self.wholes[self.graph.values[number].position]

    def _takers(self, number: int, position: int) -> frozenset[int]:
        """The branches that take a value at or after a position, in this stage."""
        uses = [p for p in self.takers.get(number, ()) if position <= p < self.last]
        return frozenset(b for p in uses if (b := self.branch[p]) is not None)

    def _others_take(self, number: int, position: int) -> bool:
        """Whether anything except branches of this place takes a value at or after a position."""
        uses = [p for p in self.takers.get(number, ()) if p >= position]
        return number in self.outputs or any(p >= self.last or self.branch[p] is None for p in uses)

    def _close(self, end: int) -> None:
        """Adds the forks and the join of the region that ends at ``end``."""
        branches: dict[int, int] = {}  # branch → its first event, in the order in which they begin
        branch_of: dict[int, int] = {}  # value → the branch that made it
        taken: dict[int, int] = {}  # value → the first event that takes it
        for p in range(self.first, end):
            if (branch := self.branch[p]) is None:
                continue
            event = self.graph.events[p]
            branches.setdefault(branch, p)
            new = self.graph.values_made_by(p)
            for n in self.inputs[p] if new or event.reads else ():
                # (A value that first occurs here is a tensor that a module keeps: a buffer that only the branch has.)
                if n not in branch_of and n not in new and n not in self.forked and self.homes.get(n) != branch:
                    taken.setdefault(n, p)
            branch_of |= dict.fromkeys(new, branch)
        self.first = end
        if branches:
            self.forks_and_joins += self._forked(taken, min(branches.values()))
            self.homes |= branch_of
            self.forks_and_joins.append(self._joined(branch_of, branches, end))

    def _forked(self, taken: Mapping[int, int], begun: int) -> list[Fork]:
        """The forks of a region, as few as possible.

        Values of the place itself are forked as early as possible: in the backward all ranks wait there for the sum of
        gradients, and should have done their own work before. A value of a branch is forked at its first use, so that its
        gradient is sent back as soon as it exists.

        Args:
            taken: value → the first event that takes it.
            begun: the first event of the region.
        """
        # (whether branches made the values, the latest position of the fork) → value → the earliest position for it
        groups: dict[tuple[bool, int], dict[int, int]] = {}
        self.forked |= taken.keys()
        for n, due in taken.items():
            of_branch = n in self.homes
            earlier = [f.position for f in self.forks if n in f.values and f.position <= due]
            ready = max([begun, self._ready(n), *earlier])
            fitting = [latest for same_kind, latest in groups if same_kind == of_branch and latest >= ready]
            groups.setdefault((of_branch, min(fitting, default=due)), {})[n] = ready
        return [
            Fork(
                latest if of_branch else max(group.values()),
                self.around,
                tuple(sorted(group)),
                {n: self._takers(n, taken[n]) - {self.homes.get(n)} for n in sorted(group)},
                {n: self.homes[n] for n in sorted(group) if of_branch},
            )
            for (of_branch, latest), group in sorted(groups.items())
        ]

    def _joined(self, branch_of: Mapping[int, int], branches: Mapping[int, int], end: int) -> Join:
        """The join of a region. ``branch_of``: value → the branch that made it; ``branches``: branch → its first event."""
        outside = {n for n in branch_of if self._others_take(n, end)}
        takers = {n: self._takers(n, end) for n in branch_of}
        values = tuple(sorted((n, b) for n, b in branch_of.items() if n in outside or takers[n] - {b}))
        apart = {n: takers[n] - {b} for n, b in values if n not in outside}
        used_by_maker = frozenset(n for n, b in values if b in takers[n])
        return Join(min(branches.values()), end, self.around, values, apart, used_by_maker, tuple(branches))


def _wholes(graph: ModelGraph, event_places: Sequence[int]) -> list[int]:
    """For each position the end of the outermost call around it whose events all have one place, because such a call runs
    untraced; the next position if there is no such call."""
    ends = [0] * len(graph.events)
    for call in sorted(graph.calls.values(), key=lambda c: (c.start, -c.stop)):
        if call.start < call.stop and not ends[call.start] and len(set(event_places[call.start : call.stop])) == 1:
            ends[call.start : call.stop] = [call.stop] * (call.stop - call.start)
    return [stop or p + 1 for p, stop in enumerate(ends)]


__all__ = [
    "Fork",
    "Join",
    "PlacesOfCalls",
    "Regions",
    "Return",
    "find_regions",
    "gradient_returns",
    "place_events",
    "row_parts",
]
