"""Regions: where branches part from the trunk and where they meet it again, read from a recorded forward.

    position   0    1        2         3         4
    event      emb  a.fc1    a.fc2     b.fc      add
    place      0    1        1         2         0
                    fork: what branches take of the trunk
                                                 join: what others take of a branch

A region begins with the first event of a branch and ends before the first event that takes a value of a branch which is
not its own; or as soon as that value is made, if the branch that made it has work of its own in between. What the branches
take of the trunk is *forked*, together, as early as it can be; what others take of a branch is *joined*, together, at the
end. Every rank of the place around a region comes to its forks and joins in the order of the program, whether or not it is
of a branch in it.

An event that no module of a branch holds is the branch's all the same, if it needs nothing but what the branch has, before
its join: a plain function without parameters, between the modules of a branch or after them. So is one that takes values of
several branches and whose result a single one takes: two tracks that exchange what they have send it to each other, and to
none else. If it draws random numbers, these are the trunk's, as on one device, and ranks of other branches draw as many
(``StageProgram.drawn``). If how many it draws follows from values, which other ranks lack, it stays on the trunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.graph import ROOT, Event, ModelGraph
from meshwright.submesh import Submeshes

Placed = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fork:
    """At ``position``, values of a place become values that its branches compute with.

    ``takers``: value → the branches that take it; ``homes``: value → the other branch that made it, and alone needs its
    gradient; of all values of a fork or of none.
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


@dataclass(frozen=True)
class Regions:
    """The place of each event, and the forks and joins in the order in which they run."""

    places: tuple[int, ...]
    moves: tuple[Fork | Join, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """From the first event of each region to its join."""
        return [(m.first, m.position) for m in self.moves if isinstance(m, Join)]

    @property
    def spans_of_several(self) -> list[tuple[int, int]]:
        """Of those regions in which branches run beside each other."""
        return [(m.first, m.position) for m in self.moves if isinstance(m, Join) and len(m.branches) > 1]

    def alone(self) -> dict[int, Join]:
        """Branches that run in no region with another: the last join of each."""
        last_joins: dict[int, Join] = {}
        joins = [m for m in self.moves if isinstance(m, Join)]
        together = {b for j in joins if len(j.branches) > 1 for b in j.branches}
        for join in joins:
            for branch in join.branches:
                if branch not in together:
                    last_joins[branch] = join
        return last_joins


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
    transfers = []
    for first, last, group in parts(taker, taken):
        for start, stop, owners in parts(home, rows):
            if stop is not None and last is not None and not max(start, first) < min(stop, last):
                continue
            transfers += [Return(r if r in group else group[r % len(group)], r, start, stop) for r in owners]
    return transfers


def find_regions(
    graph: ModelGraph,
    placed: Placed,
    places: Submeshes,
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
    wholes, span = _wholes(graph, at), (start, min(stop, graph.calls[ROOT].stop))
    for around in sorted(depth, key=lambda a: (depth[a], a)):
        outer = [m for m in moves if m.around in places.chain(around)]
        # Where a region ends, those within its branches do.
        ends = {m.position for m in outer if isinstance(m, Join)}
        forks = [m for m in outer if isinstance(m, Fork)]
        moves += _Around(graph, at, wholes, places, around, span, ends, forks, outputs).find()
    # At one position: joins before forks, the innermost first; forks from the outermost in.
    moves.sort(key=lambda m: (m.position, isinstance(m, Fork), depth[m.around] * (1 if isinstance(m, Fork) else -1)))
    return Regions(tuple(at), tuple(moves))


def place_events(graph: ModelGraph, placed: Placed, places: Submeshes) -> list[int]:
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
    joins: dict[int, int] = {}  # value → how many joins it comes after, at least
    end = graph.calls[ROOT].stop
    for p, event in enumerate(graph.events):
        if not fixed[p] and p < end:
            at[p] = _absorbed(p, made, joins, places, graph)
        around = places.chain(at[p])
        after = max((joins.get(n, 0) + (made.get(n, 0) not in around) for n in event.inputs), default=0)
        made |= dict.fromkeys(graph.made(p), at[p])
        joins |= dict.fromkeys(graph.made(p), after)
    _hand_on(graph, at, fixed, places)
    return at


def _hand_on(graph: ModelGraph, at: list[int], fixed: Sequence[bool], places: Submeshes) -> None:
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
        inputs, made = graph.events[p].inputs, graph.made(p)
        takers = {at[q] for n in made for q in graph.consumers.get(n, ())}
        if not free[p] or len(takers) != 1 or outside.intersection(made):
            continue
        (taker,) = takers
        homes = {at[maker[n]] for n in inputs}
        if taker == at[p] or (p not in graph.by_rows and any(_splits(places, h) for h in (taker, *homes))):
            continue
        around = at[p] in places.chain(taker)
        beside = not around and taker not in places.chain(at[p]) and homes == {at[p]}
        light = not graph.events[p].flops and _bytes(graph, made) >= _bytes(graph, inputs)
        if (mixed[p] and around) or (beside and light):
            at[p] = taker


def _is_free(event: Event, graph: ModelGraph, written: set[int]) -> bool:
    """Whether it does not matter where an event runs: it needs nothing but values, in memory that nothing writes to."""
    memories = {graph.values[n].storage for n in (*event.inputs, *event.outputs, event.written) if n is not None}
    return event.plain and not event.draws_by_values and not memories & written


def _bytes(graph: ModelGraph, numbers: Iterable[int]) -> int:
    return sum(graph.values[n].bytes for n in set(numbers))


def _absorbed(
    position: int, made: Mapping[int, int], joins: Mapping[int, int], places: Submeshes, graph: ModelGraph
) -> int:
    """The place of an event that no placed module holds."""
    event = graph.events[position]
    homes = {made.get(n, 0) for n in event.inputs}
    if event.reads or event.parameters or event.buffers or event.draws_by_values or not homes:
        return 0
    branches = homes - {0}
    if event.written is not None and made.get(event.inputs[0], 0) not in branches:
        return 0
    chains = [places.chain(p) for p in branches]
    if not chains:
        return 0
    longest = max(chains, key=len)
    place = longest[-1] if all(longest[: len(c)] == c for c in chains) else _common(chains)
    around = [n for n in event.inputs if made.get(n, 0) in places.chain(place)[:-1]]
    join = max(joins.get(n, 0) for n in event.inputs if n not in around)
    late = [made.get(n, 0) for n in around if joins.get(n, 0) > join]
    if late:  # it comes after the join, and would need another
        place = max(late, key=lambda p: len(places.chain(p)))
    return place if position in graph.by_rows or not _splits(places, place) else 0


def _splits(places: Submeshes, place: int) -> bool:
    """Whether ranks of a place have rows of their own."""
    return any(places[p].splits for p in places.chain(place))


def _common(chains: list[tuple[int, ...]]) -> int:
    """The innermost place around several."""
    shared = 0
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        shared = level[0]
    return shared


class _Around:
    """The regions between a place and its branches.

    Args:
        at: the place of each event.
        wholes: for each position, where the outermost call ends that runs unseen around it (``_wholes``).
        ends: positions at which a region ends in any case.
        forks: those around the place itself, from which it has its values.
        outputs: values that are wanted after the forward.
    """

    def __init__(
        self,
        graph: ModelGraph,
        at: Sequence[int],
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
        inside = [around in places.chain(p) for p in range(len(places))]
        # For each event, the branch that it is of; None: of the place itself, or outside it.
        self.branch = [places.child(p, around) if inside[p] and p != around else None for p in at]
        self.first, self.last = span  # ``first``: where the region that is being read begins
        self.homes: dict[int, int] = {}  # value → the branch that made it, in a region before
        self.forked: set[int] = set()  # once, for all that take it from then on
        self.moves: list[Fork | Join] = []

    def find(self) -> list[Fork | Join]:
        """In the order of the program."""
        made: dict[int, int] = {}  # value → the branch that has it, in this region
        p = self.first
        while p < self.last:
            event, branch = self.graph.events[p], self.branch[p]
            tied = any(made.get(n, branch) != branch for n in event.inputs)
            if tied or p in self.ends:
                p = self._end(p, made) if tied and p not in self.ends else p
                self._close(p)
                made = {}
                branch = self.branch[p]
            if branch is not None:
                made |= dict.fromkeys(self.graph.made(p), branch)
            p += 1
        self._close(self.last)
        return self.moves

    def _end(self, position: int, made: Mapping[int, int]) -> int:
        """Where a region ends, of whose values the work from ``position`` on takes some: there, or once they are made, if a
        branch that made them has work of its own in between. Then that runs beside what takes them."""
        events, branch, needs = self.graph.events, self.branch[position], set[int]()
        stop, worked = position, False
        for p in range(position, self.last):
            if self.branch[p] == branch:
                if p >= stop and worked:
                    break
                stop = max(stop, self.wholes[p])  # a call begins when all is there that it takes
                worked = worked or bool(events[p].flops)
                needs |= {n for n in events[p].inputs if made.get(n, branch) != branch}
        end = max(self._ready(n) for n in needs)
        homes = {made[n] for n in needs}
        beside = any(events[p].flops and self.branch[p] in homes for p in range(end, position))
        return end if beside else position

    def _ready(self, number: int) -> int:
        """The first position at which a value is known."""
        return self.wholes[self.graph.values[number].position]

    def _takers(self, number: int, position: int) -> frozenset[int]:
        """The branches that take a value from a position on, in this stage."""
        at_ = [p for p in self.graph.consumers.get(number, ()) if position <= p < self.last]
        return frozenset(b for p in at_ if (b := self.branch[p]) is not None)

    def _others_take(self, number: int, position: int) -> bool:
        """Whether what is not of a branch here takes a value from a position on."""
        at_ = [p for p in self.graph.consumers.get(number, ()) if p >= position]
        return number in self.outputs or any(p >= self.last or self.branch[p] is None for p in at_)

    def _close(self, end: int) -> None:
        """The region that ends there."""
        branches: dict[int, int] = {}  # in the order they begin, with where
        made: dict[int, int] = {}
        taken: dict[int, int] = {}  # value → where it is taken first
        for p in range(self.first, end):
            if (branch := self.branch[p]) is None:
                continue
            event = self.graph.events[p]
            branches.setdefault(branch, p)
            new = self.graph.made(p)
            for n in event.inputs if new or event.reads else ():
                # (What is met here for the first time is kept by a module: a buffer that the branch alone has.)
                if n not in made and n not in new and n not in self.forked and self.homes.get(n) != branch:
                    taken.setdefault(n, p)
            made |= dict.fromkeys(new, branch)
        self.first = end
        if branches:
            self.moves += self._forked(taken, min(branches.values()))
            self.homes |= made
            self.moves.append(self._joined(made, branches, end))

    def _forked(self, taken: Mapping[int, int], begun: int) -> list[Fork]:
        """As few forks as there can be. What the place has is forked as early as it can be, as all ranks wait for the sum of
        its gradients: each after its own work. What a branch made is forked where it is taken first, so that its gradient
        is sent back as soon as it is there.
        """
        # Of branches' values or not, and where it is due → value → where it is ready.
        groups: dict[tuple[bool, int], dict[int, int]] = {}
        self.forked |= taken.keys()
        for n, due in taken.items():
            made = n in self.homes
            earlier = [f.position for f in self.forks if n in f.values and f.position <= due]
            ready = max([begun, self._ready(n), *earlier])
            known = min((at for of, at in groups if of == made and at >= ready), default=due)
            groups.setdefault((made, known), {})[n] = ready
        return [
            Fork(
                at if made else max(group.values()),
                self.around,
                tuple(sorted(group)),
                {n: self._takers(n, taken[n]) - {self.homes.get(n)} for n in sorted(group)},
                {n: self.homes[n] for n in sorted(group) if made},
            )
            for (made, at), group in sorted(groups.items())
        ]

    def _joined(self, made: Mapping[int, int], branches: Mapping[int, int], end: int) -> Join:
        outside = {n for n in made if self._others_take(n, end)}
        takers = {n: self._takers(n, end) for n in made}
        values = tuple(sorted((n, b) for n, b in made.items() if n in outside or takers[n] - {b}))
        apart = {n: takers[n] - {b} for n, b in values if n not in outside}
        kept = frozenset(n for n, b in values if b in takers[n])
        return Join(min(branches.values()), end, self.around, values, apart, kept, tuple(branches))


def _wholes(graph: ModelGraph, at: Sequence[int]) -> list[int]:
    """For each position, the end of the outermost call around it whose events are all of one place, as that runs unseen;
    else the next position."""
    ends = [0] * len(graph.events)
    for call in sorted(graph.calls.values(), key=lambda c: (c.start, -c.stop)):
        if call.start < call.stop and not ends[call.start] and len(set(at[call.start : call.stop])) == 1:
            ends[call.start : call.stop] = [call.stop] * (call.stop - call.start)
    return [stop or p + 1 for p, stop in enumerate(ends)]


__all__ = ["Fork", "Join", "Placed", "Regions", "Return", "find_regions", "parts", "place_events", "returns"]
