"""Which part of the forward runs on which stage: cuts balanced by work, then by memory, then by the bytes that cross them.

A cut is a position in the recorded program (graph.py). It may be anywhere except

    within a call of a module that has no submodules, or of a repeated block (unless other positions are too few)
    between a fork and the join of branches
    after an event that reads a value on which Python acts, within the call that read it
    where tensors on both sides share memory that is written (the rule of planning/memory.py)

Three steps choose among the positions (planning/partition.py): find the smallest possible maximum of a stage's work; within
``SLACK`` of it, the smallest possible maximum of a stage's memory; within ``SLACK`` of both, the fewest bytes that cross cuts.

Work includes the receipt of far more bytes than cuts usually send. A position is left out, as long as others suffice, if a
stage that begins there has as much work as one that begins earlier: a loss alone, for example, would receive all logits.

An early stage holds the activations of more microbatches (``schedule.microbatches_held``), so it gets fewer blocks where their
work allows it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, prod
from operator import sub
from statistics import median

from meshwright.errors import Findings
from meshwright.graph import INTENSITY, ROOT, ModelGraph, spelled
from meshwright.mesh import Mesh
from meshwright.planning.partition import CutPlans, Earliest
from meshwright.recipe import Stage
from meshwright.schedule import microbatches_held

SLACK = 1.03
RECEIVED = 67 * INTENSITY
"""Operations in the time in which a byte is received, over a network of 400 Gbit/s for each device: 67 times the time in which
an H100 moves one (hardware/profiles/h100-sxm.yaml). Pipelines are what goes over nodes; within a node it is 7 times."""
FREE = 4  # times the bytes that cuts usually send: so many are received without a charge


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


def recomputed_spans(graph: ModelGraph, recomputed: Iterable[str]) -> list[tuple[int, int]]:
    """The spans of the calls of these modules, and of the model's own checkpoints, which store only what leaves them."""
    modules = frozenset(recomputed)
    return [*graph.segments.values(), *((c.start, c.stop) for c in graph.calls.values() if c.module in modules)]


@dataclass(frozen=True)
class StageMemory:
    """What a stage has in memory.

    Attributes:
        sizes: parameter → bytes of its value, its gradient and the optimizer's states.
        held: stage → the number of times that it holds the activations of this graph's rows.
        recomputed: spans (start, stop) that store only the results that are used after them.
    """

    sizes: Mapping[str, int]
    held: Sequence[float]
    recomputed: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        schedule: str,
        stages: int,
        microbatches: int,
        nbytes: Mapping[str, int],
        recomputed: Sequence[tuple[int, int]],
        *,
        pieces: int = 1,
    ) -> StageMemory:
        """What each of ``stages`` stages has, with an optimizer that has two states for each parameter, as Adam has.

        Args:
            schedule, microbatches: of the pipeline.
            nbytes: parameter → its bytes.
            recomputed: see ``StageMemory``.
            pieces: the number of microbatches, of all data ranks, of which the graph has the rows.
        """
        ranks, shards = mesh.axis_size("pp"), mesh.axis_size("dp_shard")
        held = [microbatches_held(schedule, ranks, stages, microbatches, stage) / pieces for stage in range(stages)]
        copies = parameter_copies(shards)
        sizes = {name: ceil(copies * number) for name, number in nbytes.items()}
        return cls(sizes, held, recomputed)


def parameter_copies(shards: int) -> float:
    """How often a stage has the bytes of its parameters: their values, gradients and two states. ``shards``: ranks of dp_shard.
    FSDP2 gathers a stage's parameters once a step, and shards their gradients at its end."""
    return 4.0 if shards == 1 else 2 + 3 / shards


class Costs:
    """The cost of a stage from one mark to another: work, and memory. A mark is a position at which a stage may begin or end.

    Both include what the stage receives. A stage that begins later may receive more. Then the cost from an earlier mark counts,
    as the search for cuts needs costs that never rise with a later begin.

    Args:
        graph: the recorded program.
        memory: of the stages.
        marks: positions, from 0 to the program's end.
        free: bytes that a stage receives without a charge.

    Attributes:
        crossing: mark → bytes of the values that a cut there sends to the next stage.
    """

    def __init__(self, graph: ModelGraph, memory: StageMemory, marks: Sequence[int], free: float) -> None:
        self.memory = memory
        work, stored, crossing = _work(graph), stored_bytes(graph, memory.recomputed), crossing_bytes(graph)
        self.crossing = [crossing[mark] for mark in marks]
        self._work, self._stored = [work[mark] for mark in marks], [stored[mark] for mark in marks]
        charges = (RECEIVED * max(0, received - free) for received in self.crossing)
        self._work_before = _rising(map(sub, self._work, charges))
        self._stored_before = _rising(map(sub, self._stored, self.crossing))
        self._parameters = [_parameters_of(graph, start, stop) for start, stop in pairwise(marks)]

    def by_work(self, limit: float) -> Earliest:
        """For each mark as a stage's end: the earliest mark from which its work is at most ``limit``."""
        earliest, i = [0], 0
        for j, work in enumerate(self._work[1:]):
            while i <= j and work - self._work_before[i] > limit:
                i += 1
            earliest.append(i)
        return earliest

    def by_memory(self, limit: float, held: float) -> Earliest:
        """Like ``by_work``, for bytes. ``held``: how many times the stage holds the activations of the graph's rows."""
        in_use, nbytes, earliest, i = Counter[str](), 0, [0], 0
        names, sizes = self._parameters, self.memory.sizes
        for j, stored in enumerate(self._stored[1:]):
            nbytes += sum(sizes[name] for name in names[j] if not in_use[name])
            in_use.update(names[j])
            while i <= j and nbytes + held * (stored - self._stored_before[i]) > limit:
                in_use.subtract(names[i])
                nbytes -= sum(sizes[name] for name in names[i] if not in_use[name])
                i += 1
            earliest.append(i)
        return earliest

    def most_work(self) -> int:
        """At least the work of any stage."""
        return ceil(self._work[-1] + RECEIVED * max(self.crossing))

    def most_memory(self) -> int:
        """At least the bytes of any stage."""
        nbytes = sum(self.memory.sizes[name] for name in set[str]().union(*self._parameters))
        return nbytes + ceil(max(self.memory.held) * (self._stored[-1] + max(self.crossing)))


def _rising(numbers: Iterable[float]) -> list[float]:
    """For each number the largest up to it."""
    return list(accumulate(numbers, max))


def _work(graph: ModelGraph) -> list[int]:
    """Position → work of all events before it."""
    return [0, *accumulate(event.work for event in graph.events)]


def crossing_bytes(graph: ModelGraph) -> list[int]:
    """Position → bytes of the values that a cut there sends to the next stage."""
    changes = [0] * (len(graph.events) + 2)
    for number, takers in graph.takers.items():
        value = graph.values[number]
        if max(takers) > value.position:
            changes[value.position + 1] += value.bytes
            changes[max(takers) + 1] -= value.bytes
    return list(accumulate(changes[:-1]))


def stored_bytes(graph: ModelGraph, recomputed: Iterable[tuple[int, int]]) -> list[int]:
    """Position → bytes of the results before it that a backward needs: each memory once.

    Args:
        recomputed: spans (start, stop) of which only the results count that are used after them.
    """
    stops = {position: stop for start, stop in recomputed for position in range(start, stop)}
    counted, nbytes = set[int](), [0]
    for position, event in enumerate(graph.events):
        nbytes.append(nbytes[-1])
        for n in event.outputs:
            if n is None or graph.values[n].storage in counted:
                continue
            if position not in stops or max(graph.takers.get(n, ()), default=-1) >= stops[position]:
                counted.add(graph.values[n].storage)
                nbytes[-1] += graph.values[n].bytes
    return nbytes


def _parameters_of(graph: ModelGraph, start: int, stop: int) -> set[str]:
    return {name for event in graph.events[start:stop] for name in event.parameters}


def choose_cuts(
    graph: ModelGraph,
    positions: Sequence[int],
    memory: StageMemory,
    pinned: Mapping[int, frozenset[int]],
    *,
    empty: bool = False,
) -> list[int] | None:
    """The positions at which stages 1, 2, … begin; None if the program cannot be cut so.

    Args:
        positions: positions to choose from, in order.
        memory: of the stages.
        pinned: position of an event → the stages it may be on.
        empty: whether a stage but the last may have nothing to do.
    """
    free = free_crossing(graph, positions)
    for begins in (_worthwhile(graph, positions, free), positions):
        cuts = _cuts_at(graph, begins, memory, pinned, free, empty=empty)
        if cuts is not None:
            return cuts
    return None


def free_crossing(graph: ModelGraph, positions: Sequence[int]) -> float:
    """``FREE`` times the median of the bytes that a cut at one of these positions sends."""
    crossing = crossing_bytes(graph)
    return FREE * median([crossing[position] for position in positions] or [0])


def _worthwhile(graph: ModelGraph, positions: Sequence[int], free: float) -> list[int]:
    """The positions at which a stage has no more work, with what it receives, than if it began at an earlier one.

    Args:
        free: bytes that a stage receives without a charge.
    """
    work, crossing = _work(graph), crossing_bytes(graph)
    most, worthwhile = 0.0, list[int]()
    for position in positions:
        saved = work[position] - RECEIVED * max(0, crossing[position] - free)
        if saved >= most:
            most = saved
            worthwhile.append(position)
    return worthwhile


def _cuts_at(
    graph: ModelGraph,
    positions: Sequence[int],
    memory: StageMemory,
    pinned: Mapping[int, frozenset[int]],
    free: float,
    *,
    empty: bool,
) -> list[int] | None:
    """``choose_cuts`` among positions of which none is left out. ``free``: see ``Costs``."""
    marks, stages = [0, *positions, len(graph.events)], len(memory.held)
    if len(marks) <= stages and not empty:
        return None
    costs = Costs(graph, memory, marks, free)
    runs = CutPlans(len(marks) - 1, [_by_pins(marks, pinned, k) for k in range(stages)], empty)
    work = runs.smallest(costs.most_work(), lambda limit: [costs.by_work(limit)] * stages)
    if work is None:
        return None
    within_work = costs.by_work(work * SLACK)

    def within_both(limit: float) -> list[Earliest]:
        within = {held: list(map(max, within_work, costs.by_memory(limit, held))) for held in {*memory.held}}
        return [within[held] for held in memory.held]

    least = runs.smallest(costs.most_memory(), within_both)
    assert least is not None  # the largest limit allows every stage
    return [marks[i] for i in runs.cheapest(within_both(least * SLACK), costs.crossing)]


def _by_pins(marks: Sequence[int], pinned: Mapping[int, frozenset[int]], stage: int) -> Earliest:
    """For each of ``marks`` as the end of a stage: the earliest mark from which no event is pinned to other stages only."""
    others = sorted(position for position, stages in pinned.items() if stage not in stages)
    last = (bisect_left(others, mark) - 1 for mark in marks)
    return [bisect_right(marks, others[p]) if p >= 0 else 0 for p in last]


def cut_as_before(
    graph: ModelGraph,
    stages: Sequence[Stage],
    whole: Iterable[str],
    memory: StageMemory,
    pinned: Mapping[int, frozenset[int]],
) -> tuple[int, ...] | None:
    """The positions at which stages 1, 2, … begin in a forward other than the sample's.

    They are the sample's cuts if these are allowed in this forward; else other allowed positions, with stages without work if
    there is no other way. None if the forward cannot be cut.

    Args:
        graph: this forward.
        stages: the stages of the sample's forward.
        whole: modules whose calls are not cut.
        memory: of the stages.
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
                choose_cuts(graph, positions, memory, pinned, empty=empty)
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
    ends, work, crossing, stages = [0, *cuts, len(graph.events)], _work(graph), crossing_bytes(graph), list[Stage]()
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
                work=work[stop] - work[start],
                sends=crossing[stop] if k < len(ends) - 2 else 0,
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
