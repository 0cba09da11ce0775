"""Which part of the forward runs on which stage: cuts balanced by work, then by memory, then by what crosses them.

A cut is a position in the recorded program (graph.py). It may stand anywhere but

    within a call of a module without modules in it, or of a repeated block (unless there are too few other places)
    between a fork and the join of branches
    after a value was read for Python to act on, within the module that read it
    where memory is written that is on both sides (the rule of planning/memory.py)

Among all cuts, those with the smallest largest work of a stage are found exactly (planning/partition.py); among those
within ``SLACK`` of it the ones with the smallest largest memory; among those the ones that the fewest bytes cross.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from meshwright.errors import Findings
from meshwright.graph import ROOT, ModelGraph, spelled
from meshwright.planning.partition import Earliest, Runs
from meshwright.recipe import Stage

SLACK = 1.03


@dataclass(frozen=True)
class Submeshes:
    """Where a program can be cut: positions, and the coarser of them; why not elsewhere."""

    anywhere: tuple[int, ...]
    between_blocks: tuple[int, ...]
    reasons: tuple[str, ...]


def cut_places(
    graph: ModelGraph, blocks: Iterable[str], regions: Iterable[tuple[int, int]] = (), *, of_batch: bool = False
) -> Submeshes:
    """The positions at which a stage may begin.

    Args:
        regions: spans in which branches run (regions.py).
        of_batch: also where a size is that of this batch.
    """
    end = len(graph.events)
    closed, in_block, reasons = [False] * (end + 1), [False] * (end + 1), []

    def close(start: int, stop: int, table: list[bool]) -> None:
        for b in range(start, stop):
            table[b] = True

    blocks = set(blocks)
    root = graph.calls[ROOT]
    close(root.stop, end + 1, closed)  # the loss is the last stage's
    for path, call in graph.calls.items():
        if call.leaf and len(path) > 1:
            close(call.start + 1, call.stop, closed)
        if call.module in blocks:
            close(call.start + 1, call.stop, in_block)
    for start, stop in graph.segments.values():  # what is cut is not computed again, and keeps its activations
        close(start + 1, stop, in_block)
    for start, stop in regions:
        close(start + 1, stop, closed)
        reasons.append("branches run at the same time")
    stops = {path: call.stop for path, call in graph.calls.items()}
    for i, event in enumerate(graph.events):
        if event.reads and event.inputs:  # (a parameter that is read is held by every stage)
            stop = stops.get(event.path, end)
            close(i + 1, stop, closed)
            reasons.append(f"{spelled(event.path)} reads a value ({event.function}, {event.line}) and acts on it")
    for span in (s for s in graph.spans if not (of_batch and s.of_batch)):
        close(span.first + 1, min(span.last, end) + 1, closed)
        reasons.append(span.why)
    anywhere = tuple(b for b in range(1, end) if not closed[b])
    return Submeshes(anywhere, tuple(b for b in anywhere if not in_block[b]), tuple(dict.fromkeys(reasons)))


class Costs:
    """What a stage from position a to b would cost: work, memory, bytes that enter it."""

    def __init__(self, graph: ModelGraph, sizes: Mapping[str, int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.work, self.kept = [0], [0]
        for event in graph.events:
            self.work.append(self.work[-1] + event.work)
            self.kept.append(self.kept[-1] + sum(graph.values[n].bytes for n in event.outputs if n is not None))
        self.crossing = [0] * (len(graph.events) + 1)
        for number, consumers in graph.consumers.items():
            value = graph.values[number]
            for b in range(value.position + 1, max(consumers) + 1):
                self.crossing[b] += value.bytes

    def by_work(self, marks: Sequence[int], limit: float) -> Earliest:
        """For each of ``marks``, the earliest of them from which a stage up to it has at most so much work."""
        earliest, i = [0], 0
        for stop in marks[1:]:
            while self.work[stop] - self.work[marks[i]] > limit:
                i += 1
            earliest.append(i)
        return earliest

    def by_memory(self, marks: Sequence[int], limit: float) -> Earliest:
        """The same for bytes: of parameters with gradients and two optimizer states, and of the activations of a microbatch."""
        held, parameters, earliest, i = Counter[str](), 0, [0], 0
        names = [self._parameters(start, stop) for start, stop in pairwise(marks)]
        for j, stop in enumerate(marks[1:]):
            parameters += 4 * sum(self.sizes[name] for name in names[j] if not held[name])
            held.update(names[j])
            while parameters + self.kept[stop] - self.kept[marks[i]] > limit:
                held.subtract(names[i])
                parameters -= 4 * sum(self.sizes[name] for name in names[i] if not held[name])
                i += 1
            earliest.append(i)
        return earliest

    def memory(self) -> int:
        """Bytes of one stage that has everything."""
        return 4 * sum(self.sizes[n] for n in self._parameters(0, len(self.graph.events))) + self.kept[-1]

    def _parameters(self, start: int, stop: int) -> set[str]:
        return {name for event in self.graph.events[start:stop] for name in event.parameters}


def choose_cuts(
    graph: ModelGraph,
    places: Sequence[int],
    stages: int,
    sizes: Mapping[str, int],
    pinned: Mapping[int, frozenset[int]],
    *,
    empty: bool = False,
) -> list[int] | None:
    """The positions at which stages 1, 2 … begin; None where the program has no such cuts.

    Args:
        places: positions to choose from, in order.
        empty: whether a stage but the last may have nothing to do.
        sizes: parameter → bytes.
        pinned: position of an event → the stages it may be on.
    """
    marks, costs = [0, *places, len(graph.events)], Costs(graph, sizes)
    if len(marks) <= stages and not empty:
        return None
    runs = Runs(len(marks) - 1, [_by_pins(marks, pinned, k) for k in range(stages)], empty)
    work = runs.smallest(costs.work[-1], lambda limit: costs.by_work(marks, limit))
    if work is None:
        return None
    light = costs.by_work(marks, work * SLACK)

    def small(limit: float) -> Earliest:
        return list(map(max, light, costs.by_memory(marks, limit)))

    memory = runs.smallest(costs.memory(), small)
    assert memory is not None  # all of it is the largest limit
    cuts = runs.cheapest(small(memory * SLACK), [costs.crossing[mark] for mark in marks])
    return [marks[i] for i in cuts]


def _by_pins(marks: Sequence[int], pinned: Mapping[int, frozenset[int]], stage: int) -> Earliest:
    """For each of ``marks``, the earliest of them from which nothing up to it is to be on another stage."""
    others = sorted(position for position, stages in pinned.items() if stage not in stages)
    last = (bisect_left(others, mark) - 1 for mark in marks)
    return [bisect_right(marks, others[p]) if p >= 0 else 0 for p in last]


def cut_as_before(
    graph: ModelGraph,
    stages: Sequence[Stage],
    whole: Iterable[str],
    sizes: Mapping[str, int],
    pinned: Mapping[int, frozenset[int]],
) -> tuple[int, ...] | None:
    """Where stages begin in another forward than the sample's: where they did, if that is right in this one too; else
    anywhere else that is, a stage without work if need be; None if nothing is.

    Args:
        stages: of the sample's forward.
        whole: modules whose calls are not cut.
        pinned: position → the stages that it may be on, as they have the parameters and buffers that it takes.
    """
    together = frozenset(whole)
    regions = [(c.start, c.stop) for c in graph.calls.values() if c.module in together]
    starts = [graph.positions.get(stage.first, -1) for stage in stages[1:]]
    fits = all(stage_of(starts, position) in on for position, on in pinned.items())
    for of_batch in sorted({False, *(span.of_batch for span in graph.spans)}):
        places = cut_places(graph, (), regions, of_batch=of_batch)
        if fits and starts == sorted(starts) and set(starts) <= set(places.anywhere):
            cuts: Sequence[int] | None = starts
        else:
            found = (
                choose_cuts(graph, among, len(stages), sizes, pinned, empty=empty)
                for empty in (False, True) for among in (places.between_blocks, places.anywhere)
            )  # fmt: skip
            cuts = next((c for c in found if c is not None), None)
        if cuts is not None:
            graph.of_this_batch |= of_batch
            return tuple(cuts)
    return None


def stage_of(cuts: Sequence[int], position: int) -> int:
    """The stage of an event."""
    return bisect_right(cuts, position)


def make_stages(graph: ModelGraph, cuts: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> tuple[Stage, ...]:
    """The stages that begin at 0 and at ``cuts``."""
    ends, costs, stages = [0, *cuts, len(graph.events)], Costs(graph, dict.fromkeys(shapes, 0)), []
    for k, (start, stop) in enumerate(pairwise(ends)):
        event = graph.events[start]
        inside = [c for p, c in graph.calls.items() if c.module and start <= c.start < c.stop <= stop]
        paths = {c.path for c in inside}
        outermost = [c.module for c in inside if not any(c.path[:n] in paths for n in range(1, len(c.path)))]
        names = {n for e in graph.events[start:stop] for n in e.parameters}
        stages.append(
            Stage(
                index=k,
                first=(event.path, event.index),
                where=next((c.module for c in inside if c.start == start), _name(graph, start)),
                modules=tuple(dict.fromkeys(outermost)),
                flops=sum(e.flops for e in graph.events[start:stop]),
                moved=sum(e.moved for e in graph.events[start:stop]),
                work=costs.work[stop] - costs.work[start],
                sends=costs.crossing[stop] if k < len(ends) - 2 else 0,
                parameters=sum(prod(shapes[n]) for n in names),
            )
        )
    return tuple(stages)


def parted_modules(graph: ModelGraph, stages: Sequence[Stage]) -> set[str]:
    """The modules of which a call has events in several stages."""
    cuts = [graph.positions[s.first] for s in stages[1:]]
    return {c.module for c in graph.calls.values() if c.module and any(c.start < cut < c.stop for cut in cuts)}


def no_cuts(findings: Findings, graph: ModelGraph, places: Submeshes, stages: int, ranks: int, pinned: bool) -> None:
    """Says that a model cannot be cut into so many stages, on ranks of which each has several perhaps, and where it can be."""
    possible = [_name(graph, b) for b in places.anywhere]
    most = len(possible) + 1
    why = f" ({'; '.join(places.reasons[:3])})" if places.reasons else ""
    if pinned and most >= stages:
        findings.add(
            where="modules.on",
            given="modules placed on ranks in another order than the forward runs them in",
            required=f"ranks that rise along the forward, of {stages} stages, cut at: {', '.join(possible[:12])}",
            fix="leave out on: the cuts are then found",
        )
        return
    findings.add(
        where="mesh.pp",
        given=f"{stages} stages, of a model that can be cut in {most}{why}",
        required=f"at most {most} stages" + (f", cut before: {', '.join(possible[:12])}" if possible else ""),
        fix=_fewer_stages(most, ranks, stages // ranks),
    )


def _fewer_stages(most: int, ranks: int, each: int) -> str:
    """What to write for at most so many stages, of which each rank has several now, perhaps."""
    if most < 2:
        return "mesh: {dp_shard: 2}"
    if each > 1 and most >= ranks:
        return f"stages_per_rank: {most // ranks}" if most >= 2 * ranks else "schedule: 1f1b"
    return f"mesh: {{pp: {most}}}" if each == 1 else f"mesh: {{pp: {most}}}\nschedule: 1f1b"


def _name(graph: ModelGraph, position: int) -> str:
    event = graph.events[position]
    starts = [c for c in graph.calls.values() if c.start == position and c.module]
    if starts:
        return min(starts, key=lambda c: len(c.path)).module
    return f"{event.path[-1][0] if event.path else ''} {event.function}".strip()
