"""``StageProgram``: what a rank does with each call and event of a recorded forward, in one stage; and ``crossings``.

Each call of a module is one of

    run      all of the call is this rank's: it runs, and its functions are not traced
    stub     nothing of the call is this rank's: its recorded result stands in
    open     its forward runs, and its functions are traced one by one: this rank's functions run, values of other ranks
             are ``RemoteTensor`` s, and what follows from the batch alone is computed, as on every rank
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.graph import ROOT, Call, ModelGraph, Path
from meshwright.regions import Fork, Join, PlacesOfCalls, find_regions
from meshwright.spmd.torch_functions import draws
from meshwright.submesh import Submeshes

RUN, STUB, OPEN = "run", "stub", "open"


@dataclass(frozen=True)
class Crossing:
    """The values that cross cuts: (stage, later stage) → the numbers of the values, in a fixed order."""

    cuts: tuple[int, ...]
    values: Mapping[tuple[int, int], tuple[int, ...]]

    def into(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Source stage → the values that ``stage`` receives from it."""
        return {s: numbers for (s, t), numbers in self.values.items() if t == stage}

    def out_of(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Later stage → the values that ``stage`` sends to it."""
        return {t: numbers for (s, t), numbers in self.values.items() if s == stage}


def crossings(graph: ModelGraph, cuts: Sequence[int], *, whole_output: bool = False) -> Crossing:
    """The values that cross cuts. The last stage takes the loss (which may be made before the model's last functions), what the
    model leaves in containers among its arguments, and with ``whole_output`` everything that it returns."""
    edges: dict[tuple[int, int], set[int]] = {}
    last = len(cuts)
    at_end = graph.left.union(graph.returned, (n for n in graph.calls[ROOT].outputs if n is not None and whole_output))
    for number, value in enumerate(graph.values):
        home = bisect_right(cuts, value.position)
        takers = {bisect_right(cuts, p) for p in graph.takers.get(number, ())}
        if number in at_end:
            takers.add(last)
        for taker in takers - {home}:
            edges.setdefault((home, taker), set()).add(number)
    return Crossing(tuple(cuts), {edge: tuple(sorted(numbers)) for edge, numbers in sorted(edges.items())})


class StageProgram:
    """What a rank does with each call and event of a recorded forward, in one stage.

    Args:
        placed: module → the places of its calls (regions.py). A place is the number of a submesh; 0 is the trunk.
        rank_places: the places to which the rank belongs.
        streams: module → the stream of this rank on which it runs, concurrently with others.
        whole_output: whether everything that the model returns is needed.
        batch_writes: positions of events that write to tensors of the batch.

    Attributes:
        start, stop: the events of the stage, ``start <= position < stop``.
        out: the values that later stages take.
        forks_and_joins: all of them, in the order of the program.
        joined: values that a join takes from branches.
        kept_for_forks: (place around, value) of values that a branch makes and a later fork gives to other branches.
        branch_only: values of branches that only some other branches take: only the ranks of these branches get them.
        shared_draws: draws in branches from random numbers that all ranks share.
        other_stage_draws: draws of other stages from a generator from which this stage draws too.
        last_change: the last event that changes what lasts beyond the forward; -1 if there is none.
        treatments: path of a call → ``RUN``, ``STUB`` or ``OPEN``.
        hides: path of a call in a branch → whether its code takes values beside its arguments (of a closure), as its first
            run has shown.
        unfinished: the tables of attributes and hooks that a forward of this stage leaves half done, as the first has shown.
            None before it.
        streamed: path of a call that runs on a stream → (the stream, the first position at which something takes its values).
    """

    def __init__(
        self,
        graph: ModelGraph,
        crossing: Crossing,
        stage: int,
        placed: PlacesOfCalls | None = None,
        places: Submeshes | None = None,
        rank_places: frozenset[int] = frozenset({0}),
        *,
        streams: Mapping[str, int] | None = None,
        whole_output: bool = False,
        batch_writes: Iterable[int] = (),
    ) -> None:
        ends = [0, *crossing.cuts, len(graph.events)]
        self.graph, self.stage, self.cuts, self.branches = graph, stage, crossing.cuts, places
        self.rank_places = rank_places
        self.start, self.stop = ends[stage], ends[stage + 1]
        self.last = stage == len(crossing.cuts)
        self.incoming, self.outgoing = crossing.into(stage), crossing.out_of(stage)
        self.out = tuple(sorted({n for numbers in self.outgoing.values() for n in numbers}))
        self._places: Sequence[int] = ()
        self.forks_and_joins: tuple[Fork | Join, ...] = ()
        if placed and places is not None:
            regions = find_regions(graph, placed, places, self.start, self.stop, whole_output=whole_output)
            self._places, self.forks_and_joins = regions.places, regions.forks_and_joins
        self.joined = frozenset(n for move in self.forks_and_joins if isinstance(move, Join) for n, _ in move.values)
        self.kept_for_forks = frozenset(
            (move.around, n) for move in self.forks_and_joins if isinstance(move, Fork) for n in move.homes
        )
        self.branch_only = frozenset(n for move in self.forks_and_joins if isinstance(move, Join) for n in move.takers)
        self.shared_draws = self._find_shared_draws(placed or {})
        self.other_stage_draws = self._find_other_stage_draws()
        self.last_change = self._last_change(batch_writes)
        self.hides: dict[Path, bool] = {}
        self.unfinished: list[Any] | None = None
        self.treatments = {path: self._treatment(call) for path, call in graph.calls.items()}
        self.streamed = {
            path: (stream, self._first_use(call))
            for path, call in graph.calls.items()
            if (stream := (streams or {}).get(call.module)) is not None and self._may_run_concurrently(call)
        }

    def _find_shared_draws(self, placed: PlacesOfCalls) -> frozenset[int]:
        """Draws in branches from random numbers that all ranks share: from a generator of the model's own, or from the trunk's
        if no placed module draws them."""
        events = ((p, self.graph.events[p]) for p in range(self.start, self.stop))
        return frozenset(
            p
            for p, event in events
            if event.draws
            and self.place(p)
            and (
                any(g in self.graph.drawn_along for g in event.generators)
                or not any(module in placed for module, _ in event.path)
            )
        )

    def _find_other_stage_draws(self) -> frozenset[int]:
        """Draws of other stages from generators of the model's own from which several stages draw."""
        shared_draws = (
            positions
            for positions in self.graph.drawn_along.values()
            if len({bisect_right(self.cuts, p) for p in positions}) > 1
        )
        return frozenset(p for positions in shared_draws for p in positions if not self.start <= p < self.stop)

    def _last_change(self, batch_writes: Iterable[int]) -> int:
        """The last event of this stage that changes what lasts beyond the forward; -1 if there is none.

        The stage of an event changes what modules keep for the next forward, and parameters that are written. Every stage
        changes Python's constants. A hook on a gradient belongs to the stage that makes the value.
        """
        graph = self.graph
        lasting = (*graph.changes.values(), *graph.parameter_writes.values(), *graph.listening, *batch_writes)
        changes = [p for p in lasting if self.start <= p < self.stop]
        end = [len(graph.events)] if graph.draws_held else []  # Python may draw after the last event too
        return max([*changes, *graph.repeated.values(), *self.other_stage_draws, *end], default=-1)

    def with_graph(self, graph: ModelGraph) -> StageProgram:
        """This program for a forward that differs only in sizes."""
        program = copy.copy(self)
        program.graph = graph
        return program

    def place(self, position: int) -> int:
        """The place of an event."""
        return self._places[position] if self._places else 0

    def divides(self, place: int) -> bool:
        """Whether a rank may have only some rows of the values that are made in a place."""
        return place > 0 and self.branches is not None and self.branches[place].splits

    def runs(self, position: int) -> bool:
        """Whether this rank runs an event."""
        return self.start <= position < self.stop and self.place(position) in self.rank_places

    def _treatment(self, call: Call) -> str:
        """``RUN``, ``STUB`` or ``OPEN`` for a call."""
        graph, inside = self.graph, range(call.start, call.stop)
        if call.raised:
            return OPEN
        # In a branch a rank may have some rows only, but the model's containers and objects hold values with all rows.
        followed = call.visible or (bool(call.changes) and any(map(self.place, inside)))
        values = [n for p in inside for n in graph.values_made_by(p)]
        used_outside = [n for n in values if any(p not in inside for p in graph.takers.get(n, ()))]
        events_here = sum(map(self.runs, inside))
        if not (self.shared_draws | self.other_stage_draws).isdisjoint(inside):  # every rank draws
            return OPEN
        all_here = call.start < call.stop and events_here == len(inside)
        if all_here and len({self.place(p) for p in inside}) == 1 and not followed:
            needed = {*used_outside, *({*self.out, *self.joined} & set(values))}
            hidden = not needed <= call.results or self._memory_used_later(inside) or self._takes_unseen(call)
            return OPEN if hidden else RUN
        if call.start == call.stop or events_here or call.fresh:
            return OPEN
        if call.acts:  # Python reads a value that this rank does not have
            return STUB
        if followed:
            return OPEN
        if any(n not in call.results or n in call.stashed for n in used_outside):
            return OPEN
        for p in inside:
            before = graph.overwritten(graph.events[p])
            if before is not None and graph.values[before].position < call.start:
                return OPEN
        return STUB

    def _takes_unseen(self, call: Call) -> bool:
        """Whether a call in a branch takes a value of another place that is not among its arguments (it stands in an attribute,
        or in place of a parameter). If the call ran untraced, it would not take the branch's tensor for that value."""
        place, values = self.place(call.start), self.graph.values
        if not place:
            return False
        taken = {n for p in range(call.start, call.stop) for n in self.graph.events[p].inputs} - call.inputs
        before = (values[n].position for n in taken if values[n].position < call.start)
        return any(self.divides(place) or self.place(p) != place for p in before)

    def _memory_used_later(self, inside: range) -> bool:
        """Whether an event after a call uses memory that the call wrote, through a tensor that was no value before: one that
        follows from the batch alone. If the call ran untraced, nobody would know that this tensor is a value now."""
        used_later = [memory for p, memory in self.graph.names_met if p >= inside.stop]
        written = (self.graph.values[n].storage for p in inside for n in self.graph.writes(p))
        return bool(used_later) and any(memory in used_later for memory in written)

    def _may_run_concurrently(self, call: Call) -> bool:
        """Whether a call may run concurrently with later events: nothing but its result shows that it has run."""
        events = self.graph.events[call.start : call.stop]
        ordinary = not any(e.mean_loss or draws(e.function) for e in events)
        return ordinary and self.treatments[call.path] == RUN and not (call.fresh or call.stashed or call.changes)

    def _first_use(self, call: Call) -> int:
        """The first position after a call at which something takes one of its values."""
        values = [n for p in range(call.start, call.stop) for n in self.graph.values_made_by(p)]
        later = [p for n in values for p in self.graph.takers.get(n, ()) if p >= call.stop]
        return min(later, default=len(self.graph.events))
