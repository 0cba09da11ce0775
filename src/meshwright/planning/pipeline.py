"""Which part of the forward runs on which stage: cuts balanced by work, then by memory, then by the bytes that cross them.

A cut is a position in the recorded program (graph.py). It may be anywhere except

    within a call of a module that has no submodules, or of a repeated block (unless other positions are too few)
    between a fork and the join of branches
    after an event that reads a value on which Python acts, within the call that read it
    where tensors on both sides share memory that is written (the rule of planning/memory.py)

Three steps choose among the positions (planning/partition.py): find the smallest possible maximum of a stage's work; within
``SLACK`` of it, the smallest possible maximum of a stage's memory; within ``SLACK`` of both, the fewest bytes that cross cuts.
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
from meshwright.planning.partition import CutPlans, Earliest
from meshwright.recipe import Stage

SLACK = 1.03


@dataclass(frozen=True)
class CutPositions:
    """The positions at which a program can be cut.

    Attributes:
        anywhere: all of them; ``between_blocks``: those that are not within a repeated block or a checkpoint.
        reasons: why other positions are not allowed, as text for a person.
    """

    anywhere: tuple[int, ...]
    between_blocks: tuple[int, ...]
    reasons: tuple[str, ...]


def cut_positions(
    graph: ModelGraph, blocks: Iterable[str], regions: Iterable[tuple[int, int]] = (), *, of_batch: bool = False
) -> CutPositions:
    """The positions at which a stage may begin.

    Args:
        blocks: names of the repeated blocks.
        regions: spans (start, stop) in which branches run at the same time (regions.py).
        of_batch: also allow cuts that are right only for the sizes in this batch.
    """
    end = len(graph.events)
    closed, in_block, reasons = [False] * (end + 1), [False] * (end + 1), []

    def close(start: int, stop: int, table: list[bool]) -> None:
        for b in range(start, stop):
            table[b] = True

    blocks = set(blocks)
    root = graph.calls[ROOT]
    close(root.stop, end + 1, closed)  # the last stage computes the loss
    for path, call in graph.calls.items():
        if call.leaf and len(path) > 1:
            close(call.start + 1, call.stop, closed)
        if call.module in blocks:
            close(call.start + 1, call.stop, in_block)
    # A checkpoint that is cut does not recompute: its activations stay in memory.
    for start, stop in graph.segments.values():
        close(start + 1, stop, in_block)
    for start, stop in regions:
        close(start + 1, stop, closed)
        reasons.append("branches run at the same time")
    stops = {path: call.stop for path, call in graph.calls.items()}
    for i, event in enumerate(graph.events):
        if event.reads and event.inputs:  # (reads of parameters only are no obstacle: every stage has such a parameter)
            stop = stops.get(event.path, end)
            close(i + 1, stop, closed)
            reasons.append(f"{spelled(event.path)} reads a value ({event.function}, {event.line}) and acts on it")
    for span in (s for s in graph.spans if not (of_batch and s.of_batch)):
        close(span.first + 1, min(span.last, end) + 1, closed)
        reasons.append(span.why)
    anywhere = tuple(b for b in range(1, end) if not closed[b])
    return CutPositions(anywhere, tuple(b for b in anywhere if not in_block[b]), tuple(dict.fromkeys(reasons)))


class Costs:
    """The cost of a stage from one position to another: work, memory, and the bytes that enter it.

    Attributes:
        work: position → work of all events before it; ``result_bytes``: position → bytes of all results before it.
        crossing: position → bytes of the values that a cut there sends to the next stage.
    """

    def __init__(self, graph: ModelGraph, sizes: Mapping[str, int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.work, self.result_bytes = [0], [0]
        for event in graph.events:
            self.work.append(self.work[-1] + event.work)
            self.result_bytes.append(
                self.result_bytes[-1] + sum(graph.values[n].bytes for n in event.outputs if n is not None)
            )
        self.crossing = [0] * (len(graph.events) + 1)
        for number, takers in graph.takers.items():
            value = graph.values[number]
            for b in range(value.position + 1, max(takers) + 1):
                self.crossing[b] += value.bytes

    def by_work(self, marks: Sequence[int], limit: float) -> Earliest:
        """For each of ``marks`` as a stage's end: the index of the earliest mark from which its work is at most ``limit``."""
        earliest, i = [0], 0
        for stop in marks[1:]:
            while self.work[stop] - self.work[marks[i]] > limit:
                i += 1
            earliest.append(i)
        return earliest

    def by_memory(self, marks: Sequence[int], limit: float) -> Earliest:
        """Like ``by_work``, for bytes: parameters with gradients and two optimizer states, plus one microbatch's
        activations."""
        in_use, parameters, earliest, i = Counter[str](), 0, [0], 0
        names = [self._parameters(start, stop) for start, stop in pairwise(marks)]
        for j, stop in enumerate(marks[1:]):
            parameters += 4 * sum(self.sizes[name] for name in names[j] if not in_use[name])
            in_use.update(names[j])
            while parameters + self.result_bytes[stop] - self.result_bytes[marks[i]] > limit:
                in_use.subtract(names[i])
                parameters -= 4 * sum(self.sizes[name] for name in names[i] if not in_use[name])
                i += 1
            earliest.append(i)
        return earliest

    def memory(self) -> int:
        """Bytes of one stage that runs the whole program."""
        return 4 * sum(self.sizes[n] for n in self._parameters(0, len(self.graph.events))) + self.result_bytes[-1]

    def _parameters(self, start: int, stop: int) -> set[str]:
        return {name for event in self.graph.events[start:stop] for name in event.parameters}


def choose_cuts(
    graph: ModelGraph,
    positions: Sequence[int],
    stages: int,
    sizes: Mapping[str, int],
    pinned: Mapping[int, frozenset[int]],
    *,
    empty: bool = False,
) -> list[int] | None:
    """The positions at which stages 1, 2, … begin; None if the program cannot be cut so.

    Args:
        places: positions to choose from, in order.
        empty: whether a stage but the last may have nothing to do.
        sizes: parameter → bytes.
        pinned: position of an event → the stages it may be on.
    """
    marks, costs = [0, *positions, len(graph.events)], Costs(graph, sizes)
    if len(marks) <= stages and not empty:
        return None
    runs = CutPlans(len(marks) - 1, [_by_pins(marks, pinned, k) for k in range(stages)], empty)
    work = runs.smallest(costs.work[-1], lambda limit: costs.by_work(marks, limit))
    if work is None:
        return None
    within_work = costs.by_work(marks, work * SLACK)

    def within_both(limit: float) -> Earliest:
        return list(map(max, within_work, costs.by_memory(marks, limit)))

    memory = runs.smallest(costs.memory(), within_both)
    assert memory is not None  # the largest limit allows every stage
    cuts = runs.cheapest(within_both(memory * SLACK), [costs.crossing[mark] for mark in marks])
    return [marks[i] for i in cuts]


def _by_pins(marks: Sequence[int], pinned: Mapping[int, frozenset[int]], stage: int) -> Earliest:
    """For each of ``marks`` as the end of a stage: the earliest mark from which no event is pinned to other stages only."""
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
    """The positions at which stages 1, 2, … begin in a forward other than the sample's.

    They are the sample's cuts if these are allowed in this forward; else other allowed positions, with stages without work if
    there is no other way. None if the forward cannot be cut.

    Args:
        graph: this forward.
        stages: the stages of the sample's forward.
        whole: modules whose calls are not cut.
        sizes: parameter → bytes.
        pinned: position of an event → the stages that have its parameters and buffers, so it may be on these.
    """
    together = frozenset(whole)
    regions = [(c.start, c.stop) for c in graph.calls.values() if c.module in together]
    starts = [graph.positions.get(stage.first, -1) for stage in stages[1:]]
    fits = all(stage_of(starts, position) in on for position, on in pinned.items())
    for of_batch in sorted({False, *(span.of_batch for span in graph.spans)}):
        allowed = cut_positions(graph, (), regions, of_batch=of_batch)
        if fits and starts == sorted(starts) and set(starts) <= set(allowed.anywhere):
            cuts: Sequence[int] | None = starts
        else:
            candidates = (
                choose_cuts(graph, positions, len(stages), sizes, pinned, empty=empty)
                for empty in (False, True) for positions in (allowed.between_blocks, allowed.anywhere)
            )  # fmt: skip
            cuts = next((c for c in candidates if c is not None), None)
        if cuts is not None:
            graph.of_this_batch |= of_batch
            return tuple(cuts)
    return None


def stage_of(cuts: Sequence[int], position: int) -> int:
    """The number of the stage of the event at ``position``."""
    return bisect_right(cuts, position)


def make_stages(graph: ModelGraph, cuts: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> tuple[Stage, ...]:
    """The stages that begin at position 0 and at ``cuts``. ``shapes``: parameter → its shape."""
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
    """The modules with a call that has events in several stages."""
    cuts = [graph.positions[s.first] for s in stages[1:]]
    return {c.module for c in graph.calls.values() if c.module and any(c.start < cut < c.stop for cut in cuts)}


def no_cuts(
    findings: Findings, graph: ModelGraph, allowed: CutPositions, stages: int, ranks: int, pinned: bool
) -> None:
    """Adds the finding that a model cannot be cut into ``stages`` stages, with the positions at which it can be cut.

    Args:
        ranks: the number of pp ranks; each has ``stages / ranks`` stages.
        pinned: whether the plan places modules on stages.
    """
    possible = [_name(graph, b) for b in allowed.anywhere]
    most = len(possible) + 1
    why = f" ({'; '.join(allowed.reasons[:3])})" if allowed.reasons else ""
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
    """The plan's line for at most ``most`` stages. ``each``: how many stages a rank has in the plan now."""
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
