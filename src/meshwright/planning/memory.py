"""Which memory a forward writes, and which parts of the forward must therefore stay in one pipeline stage. The rule, in full:

    Each stage has copies. A value that crosses a cut arrives in memory of its own, with the contents that were written before
    the cut. So a cut is right if no later write must reach a tensor on the other side of the cut through shared memory:

    1  Several tensors in one memory (a tensor and a slice of it). If an event at or after a cut writes to the memory, at most
       one of its tensors may be made before the cut and used at or after it.
    2  Memory that is computed from the batch alone. Every stage has it, until an event first writes to it; from then on it is
       a value. Its other tensors are not sent with the value: all their uses are in the stage of that write.
    3  Memory that outlives the forward (a buffer, an attribute of a module, a parameter that is written), if the forward
       changes or makes it and the next forward begins with it: all events from its first use to its last change are in one
       stage. Only that stage has the memory. Other stages get the values that they use later in the forward; if several
       tensors of modules lie in the memory, no event gives them the others, and all uses are in that stage. What an event
       whose functions are not followed assigns to an attribute is no result of that event, so no stage can get it: if code
       outside such events uses the attribute, all events from its first use to the end are in one stage.
    4  A checkpoint of the model's own that changes such memory: it stays whole, as it changes the memory twice, as on one
       device.
    5  A ``torch.Generator`` of the model's own from which several places of the forward draw. Each rank has a copy, and draws
       the numbers of other stages as well (``StageProgram.other_stage_draws``). All its draws are in one stage if a rank cannot
       do that: if how many numbers are drawn depends on values, or if a checkpoint of the model's own draws them again.
    6  Random numbers from Python and NumPy. Every stage runs the Python code that draws them, up to the forward's end if a
       module holds the generator. A call that acts on a value runs on its stage only: if it may draw, there is no cut after
       it, and no cut at all if a module holds the generator.
    7  A gradient that the forward asks for itself: all events from the first use of the tensors with respect to which it is
       taken are in one stage, since an autograd graph belongs to one stage.
    8  A sparse or nested tensor: its event and all its uses are in one stage, since only strided tensors are sent.

Whether tensors share memory is read from their storages, not from names or functions. Which tensors an op writes is read from
its ATen schema. A write gives every tensor in the memory a new number (``Event.renamed``), so that the stage of the write sends
the contents after the write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from meshwright.calls.tracer import Slot
from meshwright.described import tensors_among
from meshwright.errors import PlanError
from meshwright.graph import ROOT, Call, ModelGraph, Path, Span, spelled
from meshwright.planning.module_state import has_memory
from meshwright.private import DispatchMode, has_backward_hooks, storage_of
from meshwright.spmd.torch_functions import written_by


class Memory(DispatchMode):
    """Records, for each ATen op, the memory that it writes and the memory that it allocates.

    Attributes:
        ticks: how many ops have run; also the number of the last op.
        allocated: memory → the number of the op that allocated it. Memory from before this mode was entered has no entry.
        written: memory → the number of the op that last wrote to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0
        self.allocated: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.ticks += 1
        targets = [t for t in tensors_among(v for _, v in written_by(func, args, kwargs)) if has_memory(t)]
        self.written |= dict.fromkeys(map(storage_of, targets), self.ticks)
        if not targets and not func.is_view:
            arguments = {storage_of(t) for t in tensors_among((*args, *kwargs.values())) if has_memory(t)}
            returned = {storage_of(t) for t in tensors_among((out,)) if has_memory(t)}
            self.allocated |= dict.fromkeys(returned - arguments, self.ticks)
        return out

    def since(self, tick: int) -> set[int]:
        """The memories that were written after op number ``tick``."""
        return {memory for memory, last in self.written.items() if last > tick}


# --- what is kept together --------------------------------------------------------------------------------------------


@dataclass
class Touches:
    """Positions of the events that use a memory or slot, and of those that change it."""

    used: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


def keep_together(
    graph: ModelGraph,
    foreign: Mapping[int, Touches],
    slots: Mapping[Slot, Touches],
    parameters: Mapping[str, Touches],
    at_end: Iterable[int],
) -> None:
    """Adds to the graph the spans that must stay within one stage, by the rule at the head of this file.

    Args:
        foreign: memory that is computed from the batch alone and that events write → its uses and changes.
        slots: slot whose content one forward leaves to the next → its uses and changes.
        parameters: parameter that the forward writes → its uses and changes.
        at_end: numbers of the values that modules hold when the forward has ended.
    """
    graph.spans += _names_of_written_memory(graph, at_end)
    graph.spans += _values_left_unreturned(graph)
    graph.spans += _changed_by_what_acts(graph)
    graph.spans += _drawn_from_one_generator(graph)
    graph.spans += _drawn_as_values_decide(graph)
    graph.spans += _differentiated(graph)
    graph.spans += _written_before_checkpoints(graph)
    graph.spans += _sparse_or_nested(graph)
    for touched in foreign.values():
        graph.spans.append(
            _span(graph, touched.changed[:1] + touched.used, "a write in place to what follows from the batch")
        )
    for (module, name), touched in slots.items():
        slot_name = ".".join(filter(None, (module, name)))
        graph.spans.append(
            _span(graph, touched.used[:1] + touched.changed, f"{slot_name} is kept for the next forward")
        )
    for name, touched in parameters.items():
        graph.spans.append(_span(graph, touched.used, f"the forward writes {name}"))
    changed = {p for touched in (*foreign.values(), *slots.values(), *parameters.values()) for p in touched.changed}
    for start, stop in graph.segments.values():  # (a checkpoint that is cut does not recompute: see ``segment_begins``)
        if any(start <= p < stop for p in changed):
            graph.spans.append(_span(graph, [start, stop - 1], "a checkpoint changes it twice, as on one device"))
    graph.spans = [s for s in dict.fromkeys(graph.spans) if s.first < s.last]


def _written_before_checkpoints(graph: ModelGraph) -> Iterator[Span]:
    """Spans from a tensor that was written in place to a checkpoint of the model's own that uses it.

    The model passes the tensor itself to the checkpoint. In a stage without the write, that tensor has the contents from before
    the write; and the checkpoint's recomputation is not followed, so nothing replaces the tensor there.
    """
    written = {n for p in range(len(graph.events)) for n in graph.writes(p)} if graph.segments else set()
    for start, stop in graph.segments.values():
        inputs = written.intersection(n for event in graph.events[start:stop] for n in event.inputs)
        for position in sorted({p for n in inputs if (p := graph.values[n].position) < start}):
            yield _span(graph, [position, stop - 1], "a checkpoint takes a tensor that is written in place")


def _sparse_or_nested(graph: ModelGraph) -> Iterator[Span]:
    """Spans from each sparse or nested tensor to its last use: only strided tensors can be sent to another stage."""
    for number, takers in graph.takers.items():
        if not (value := graph.values[number]).strided:
            yield _span(graph, [value.position, *takers], "a sparse or nested tensor")


def _span(graph: ModelGraph, positions: list[int], why: str) -> Span:
    if not positions:
        return Span(0, 0, why)
    first, last = min(positions), max(positions)
    line = graph.events[min(last, len(graph.events) - 1)].line if graph.events else ""
    return Span(first, last, f"{why} ({line})")


def size_of_value(graph: ModelGraph, values: Iterable[int], *, of_batch: bool = False) -> list[Span]:
    """Spans from each of ``values``, whose sizes depend on values, to its last use.

    Args:
        of_batch: whether the sizes depend on values of the batch only.
    """
    uses = ([graph.values[n].position, *graph.takers.get(n, ())] for n in values)
    why = "a tensor whose size follows from values"
    spans = (replace(_span(graph, positions, why), of_batch=of_batch) for positions in uses)
    return [s for s in dict.fromkeys(spans) if s.first < s.last]


def path_of_sizes(graph: ModelGraph, other: ModelGraph) -> list[Span]:
    """The span that two recordings with different assumed sizes do not have in common, if the path depends on these sizes: from
    the first event that differs to the last use of a value from the events that differ."""
    steps = [
        [(e.path, e.function, [g.values[n].shape for n in e.outputs if n is not None]) for e in g.events]
        for g in (graph, other)
    ]
    count = min(map(len, steps))
    first = next((p for p in range(count) if steps[0][p] != steps[1][p]), count)
    alike = next((p for p in range(count - first) if steps[0][-1 - p] != steps[1][-1 - p]), count - first)
    stop = len(graph.events) - alike
    uses = [q for p in range(first, stop) for n in graph.values_made_by(p) for q in graph.consumers.get(n, ())]
    if first >= stop:
        return []
    return [_span(graph, [first, stop - 1, *uses], "what is called follows from a size that follows from values")]


def path_of_the_next_forward(graph: ModelGraph, following: ModelGraph, slots: Sequence[Slot]) -> list[Span]:
    """Spans for calls that take another path in the next forward, because of state that this forward leaves in ``slots``.

    Such a call, or one around it that stages do not follow, runs on one stage. Example: a module that computes a table in its
    first call and reads it in its second; the call of the module that calls it twice is kept in one stage.

    Args:
        graph: this forward; ``following``: the next one.

    Raises:
        PlanError: the path differs in calls that every stage follows.
    """
    events, next_events = (_events_by_call(g) for g in (graph, following))
    spans = []
    for path in [p for p in dict.fromkeys((*events, *next_events)) if events.get(p) != next_events.get(p)]:
        calls = [c for depth in range(len(path), 0, -1) if (c := graph.calls.get(path[:depth])) is not None]
        if not calls or any(c.acts for c in calls):
            continue  # a call that acts on a value is recorded anew
        around = next((c for c in calls if not _looked_into(graph, c)), None)
        if around is None:
            raise _other_way(graph, following, path, slots)
        around.visible = False  # only its stage runs it, and only its stage uses the state that it changes
        spans.append(
            _span(graph, [around.start, around.stop - 1], f"{spelled(around.path)} goes another way next time")
        )
    return [s for s in spans if s.first < s.last]


def _looked_into(graph: ModelGraph, call: Call) -> bool:
    """Whether other stages follow a call even if one stage runs all of it: the model's own call; a call that changes state that
    others read; a call whose values others use without getting them from its result."""
    if call.path == ROOT or (call.visible and not call.counts) or call.fresh:
        return True
    inside = range(call.start, call.stop)
    returned = call.results - call.stashed
    unreturned = (n for p in inside for n in graph.values_made_by(p) if n not in returned)
    return any(p not in inside for n in unreturned for p in graph.consumers.get(n, ()))


def _events_by_call(graph: ModelGraph) -> dict[Path, list[tuple[str, tuple[Any, ...]]]]:
    events: dict[Path, list[tuple[str, tuple[Any, ...]]]] = {}
    for event in graph.events:
        shapes = tuple(None if n is None else graph.values[n].shape for n in event.outputs)
        events.setdefault(event.path, []).append((event.function, shapes))
    return events


def _other_way(graph: ModelGraph, following: ModelGraph, path: Path, slots: Sequence[Slot]) -> PlanError:
    """The error for a forward that goes another way than the one before it."""
    events = [[e for e in g.events if e.path == path] for g in (graph, following)]
    pairs = enumerate(zip(*events, strict=False))
    differing = (i for i, (a, b) in pairs if a.function != b.function)
    first = next(differing, min(map(len, events)))
    line = next((e[first].line for e in events[::-1] if first < len(e)), "")
    names = ", ".join(".".join(filter(None, slot)) for slot in slots[:3])
    return PlanError.of(
        "this plan",
        where=f"the model's {line or 'forward'}, in {spelled(path)}",
        given=f"a forward that goes another way than the one before it, for what that left in {names}",
        required="for a pipeline, what one forward leaves for the next to act on, kept and used in one module within the model",
        fix="mesh: {dp_shard: 2}",
    )


def told_in_backward(model: nn.Module, graph: ModelGraph) -> None:
    """Adds a span for each call of a module with backward hooks, so that it is not cut: such a hook runs when the backward
    reaches the module, and reads state that the module's forward left."""
    # A node for the inputs of a module, and one for its outputs, beside its call. Neither may be cut: it has one backward.
    graph.spans += [_span(graph, [*node], "a backward hook") for node in graph.hook_nodes if node[0] < node[1]]
    for call in graph.calls.values():
        if call.path != ROOT and has_backward_hooks(model.get_submodule(call.module)):
            span = _span(graph, [*graph.with_hook_nodes(call)], f"{call.module} has a backward hook")
            graph.spans += [span] if span.first < span.last else []


def _values_left_unreturned(graph: ModelGraph) -> Iterator[Span]:
    """Spans for values of a call that reads a value, if they are used after the call without being returned or appended to a
    list (a write in place, for example). Other stages do not follow such a call, so only its stage has these values."""
    for call in graph.calls.values():
        if not call.acts or call.path == ROOT:
            continue
        inside = range(call.start, call.stop)
        unreturned = {n: p for p in inside for n in graph.values_made_by(p) if n not in call.results}
        uses = [
            (n, position, p) for n, position in unreturned.items() for p in graph.consumers.get(n, ()) if p >= call.stop
        ]
        if uses:
            first_read = min(p for p in inside if graph.events[p].path == call.path and graph.events[p].reads)
            first = min(first_read, *(position for _, position, _ in uses))
            # A stage that does not follow the call has the batch as it was, and would not know that it is a value now.
            of_batch = any(_was_of_the_batch(graph, n) for n, _, _ in uses)
            last = len(graph.events) if of_batch else max(use for _, _, use in uses)
            yield _span(graph, [first, last], f"what {spelled(call.path)} leaves follows from a value that it reads")


def _was_of_the_batch(graph: ModelGraph, number: int) -> bool:
    """Whether a value came to be by a write in place to memory that followed from the batch alone."""
    value = graph.values[number]
    is_written = graph.events[value.position].written == number
    return is_written and not any(v.storage == value.storage for v in graph.values[:number])


def _changed_by_what_acts(graph: ModelGraph) -> Iterator[Span]:
    """Spans for calls that read a value and change the batch in place, say. Later stages would not follow such a call, so there
    are none: the stage of the read runs all the rest."""
    for read in graph.held:
        call = graph.calls[graph.events[read].path]
        if call.untold and call.path != ROOT:
            why = f"{spelled(call.path)} reads a value, and changes what is not its own"
            yield _span(graph, [read, len(graph.events)], why)


def _drawn_from_one_generator(graph: ModelGraph) -> Iterator[Span]:
    """Spans for generators of the model's own from which several events draw.

    If other stages cannot draw the same count of numbers, all draws of a generator are in one span. Else every stage must reach
    the last draw: a call that reads a value before it may not be cut between its start and the read.
    """
    for generator, positions in graph.drawn_from.items():
        if generator not in graph.drawn_along:
            yield _span(graph, positions, "how often one generator is drawn from follows from more than shapes")
            continue
        for r, event in enumerate(graph.events):
            if event.reads and event.inputs and event.path != ROOT and r < positions[-1]:
                start = graph.calls[event.path].start
                yield _span(graph, [start, r], f"{spelled(event.path)} reads a value before a generator is drawn from")


def _drawn_as_values_decide(graph: ModelGraph) -> Iterator[Span]:
    """Spans for calls that act on a value and may draw random numbers from Python or NumPy.

    Such a call runs on its stage only, so other stages do not know how many numbers it drew. Later draws continue from there:
    the span reaches to the forward's end, and covers all of it if a module holds the generator (the next forward draws on).
    """
    for call in graph.calls.values():
        if call.acts and call.draws_host and call.path != ROOT:
            first = 0 if graph.draws_held else call.start
            why = f"how many random numbers {spelled(call.path)} draws may follow from a value that it reads"
            yield _span(graph, [first, len(graph.events) - 1], why)


def _differentiated(graph: ModelGraph) -> Iterator[Span]:
    """Spans for gradients that the forward asks for itself (``torch.autograd.grad``): from the first use of the tensors with
    respect to which they are taken, under any number that a write in place gave these tensors, to the call that asks."""
    for position, values in graph.differentiated.items():
        first = 0
        if values is not None:
            names = {graph.values[n].name for n in values}
            numbers = (n for n, value in enumerate(graph.values) if value.name in names)
            first = min((p for n in numbers for p in graph.consumers.get(n, ())), default=0)
        yield _span(graph, [first, position], "the forward asks for a gradient itself")


def _names_of_written_memory(graph: ModelGraph, at_end: Iterable[int]) -> Iterator[Span]:
    """Spans in which two tensors of one memory are in use, up to the last write to the memory. (``Value.name`` identifies a
    tensor; a write in place gives it another number.)"""
    writes: dict[int, int] = {}
    for position in range(len(graph.events)):
        for n in graph.writes(position):
            if graph.values[n].storage:
                writes[graph.values[n].storage] = position
    lives: dict[int, dict[int, list[int]]] = defaultdict(dict)  # memory → name → the event that made it, its last use
    outputs = {*graph.returned, *graph.calls[ROOT].outputs, *graph.left, *at_end}
    for number, value in enumerate(graph.values):
        if value.storage in writes:
            last = len(graph.events) if number in outputs else max(graph.takers.get(number, ()), default=-1)
            life = lives[value.storage].setdefault(value.name, [value.position, last])
            life[0], life[1] = min(life[0], value.position), max(life[1], last)
    for memory, names in lives.items():
        last_write = writes[memory]
        reached = -1  # the last use of the names seen so far
        for first, last in sorted(map(tuple, names.values())):
            stop = min(reached, last, last_write)
            if stop > first:
                line = graph.events[last_write].line
                yield Span(first, stop, f"a write in place to memory that has several names ({line})")
            reached = max(reached, last)
