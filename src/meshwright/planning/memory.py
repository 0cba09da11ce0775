"""Which memory a forward writes, and what that keeps within one stage of a pipeline. The rule, in full:

    Stages have copies. A value that crosses a cut arrives as memory of its own, with what was written to it until then. So a
    cut is right if no later write would have to reach, through memory, what is on its other side:

    1  Names of one memory. If something at or after a cut writes to a memory, at most one name of it (a tensor: a slice and
       what it is a slice of are two) was made before the cut and is used at or after it.
    2  Memory that follows from the batch alone, which every stage has, is a value from the first write of an event on. Its
       other names were not sent with it: they are met in the stage of that write.
    3  Memory that outlives the forward (a buffer, an attribute of a module, a parameter that is written), if the forward
       changes or makes it and the next one begins with it: from its first use to its last change all is in one stage. That
       stage alone has it; others are sent what they take of it later in the forward.
    4  What a checkpoint of the model's own computes again, if it changes such memory: it does so twice, on one device as well.
    5  A ``torch.Generator`` of the model's own, from which several places of the forward draw: each rank has a copy, and draws
       along with other stages (``StageProgram.along``). Where it cannot, all that draws from it is in one stage: if how many
       numbers are drawn follows from values, or if a checkpoint of the model's own draws them again.
    6  Random numbers of Python's and NumPy's: every stage runs the Python that draws them, if a module holds the generator to
       the forward's end. A call that acts on a value is run by its stage alone: if it may draw, no cut is made after it, and
       none at all if a module holds the generator.
    7  A gradient that the forward asks for itself: from the first use of that by which it is asked, as autograd's graph is one
       stage's.
    8  A sparse or nested tensor: from where it is made to its last use, as what is sent is strided.

What aliases what is asked of storages, not of names or functions; what is written is asked of ATen's ops. A write gives every
tensor of the memory another number (``Event.renamed``), so that the stage in which the write is sends what is there then.
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
from meshwright.planning.kept import has_memory
from meshwright.private import DispatchMode, has_backward_hooks, storage_of
from meshwright.spmd.torch_functions import written_by


class Memory(DispatchMode):
    """Notes, of each ATen op, the memory that it writes and the memory that it makes.

    Attributes:
        ticks: ops so far.
        made: memory → the op that made it; none for memory that was there before.
        written: memory → the op that last wrote to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0
        self.made: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.ticks += 1
        targets = [t for t in tensors_among(v for _, v in written_by(func, args, kwargs)) if has_memory(t)]
        self.written |= dict.fromkeys(map(storage_of, targets), self.ticks)
        if not targets and not func.is_view:
            taken = {storage_of(t) for t in tensors_among((*args, *kwargs.values())) if has_memory(t)}
            returned = {storage_of(t) for t in tensors_among((out,)) if has_memory(t)}
            self.made |= dict.fromkeys(returned - taken, self.ticks)
        return out

    def since(self, tick: int) -> set[int]:
        """The memory that was written after an op."""
        return {memory for memory, last in self.written.items() if last > tick}


# --- what is kept together --------------------------------------------------------------------------------------------


@dataclass
class Touches:
    """Positions at which a memory, or a slot, is used and changed."""

    used: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


def keep_together(
    graph: ModelGraph,
    foreign: Mapping[int, Touches],
    slots: Mapping[Slot, Touches],
    parameters: Mapping[str, Touches],
    at_end: Iterable[int],
) -> None:
    """Writes to the graph what the rule at the head of this file keeps within one stage.

    Args:
        foreign: memory that follows from the batch, and that events write.
        slots: of those that are carried from one forward to the next.
        parameters: that the forward writes.
        at_end: values that modules hold when the forward has ended.
    """
    graph.spans += _names_of_written_memory(graph, at_end)
    graph.spans += _left_unseen(graph)
    graph.spans += _drawn_from_one_generator(graph)
    graph.spans += _drawn_as_values_decide(graph)
    graph.spans += _differentiated(graph)
    graph.spans += _written_before(graph)
    graph.spans += _sparse_or_nested(graph)
    for touched in foreign.values():
        graph.spans.append(
            _span(graph, touched.changed[:1] + touched.used, "a write in place to what follows from the batch")
        )
    for (module, name), touched in slots.items():
        what = ".".join(filter(None, (module, name)))
        graph.spans.append(_span(graph, touched.used[:1] + touched.changed, f"{what} is kept for the next forward"))
    for name, touched in parameters.items():
        graph.spans.append(_span(graph, touched.used, f"the forward writes {name}"))
    changed = {p for touched in (*foreign.values(), *slots.values(), *parameters.values()) for p in touched.changed}
    for start, stop in graph.segments.values():  # (what is cut is not run again: ``StageInterpreter.segment_begins``)
        if any(start <= p < stop for p in changed):
            graph.spans.append(_span(graph, [start, stop - 1], "a checkpoint changes it twice, as on one device"))
    graph.spans = [s for s in dict.fromkeys(graph.spans) if s.first < s.last]


def _written_before(graph: ModelGraph) -> Iterator[Span]:
    """What a checkpoint takes of a tensor that was written in place: the model hands it the tensor, which in another stage than
    that of the write stands for what it was before; and what the checkpoint computes again is not looked into."""
    written = {n for p in range(len(graph.events)) for n in graph.writes(p)} if graph.segments else set()
    for start, stop in graph.segments.values():
        taken = written.intersection(n for event in graph.events[start:stop] for n in event.inputs)
        for position in sorted({p for n in taken if (p := graph.values[n].position) < start}):
            yield _span(graph, [position, stop - 1], "a checkpoint takes a tensor that is written in place")


def _sparse_or_nested(graph: ModelGraph) -> Iterator[Span]:
    """What is sent is a strided tensor: values of other layouts stay in the stage that makes them."""
    for number, consumers in graph.consumers.items():
        if not (value := graph.values[number]).strided:
            yield _span(graph, [value.position, *consumers], "a sparse or nested tensor")


def _span(graph: ModelGraph, positions: list[int], why: str) -> Span:
    if not positions:
        return Span(0, 0, why)
    first, last = min(positions), max(positions)
    line = graph.events[min(last, len(graph.events) - 1)].line if graph.events else ""
    return Span(first, last, f"{why} ({line})")


def size_of_value(graph: ModelGraph, values: Iterable[int], *, of_batch: bool = False) -> list[Span]:
    """What keeps values of sizes that follow from values, of the batch perhaps, on one side of a cut."""
    uses = ([graph.values[n].position, *graph.consumers.get(n, ())] for n in values)
    why = "a tensor whose size follows from values"
    spans = (replace(_span(graph, positions, why), of_batch=of_batch) for positions in uses)
    return [s for s in dict.fromkeys(spans) if s.first < s.last]


def path_of_sizes(graph: ModelGraph, other: ModelGraph) -> list[Span]:
    """The same, if the path follows from these sizes: from where two recordings with other sizes begin to differ, to the last
    use of what was made until they are alike again."""
    steps = [
        [(e.path, e.function, [g.values[n].shape for n in e.outputs if n is not None]) for e in g.events]
        for g in (graph, other)
    ]
    count = min(map(len, steps))
    first = next((p for p in range(count) if steps[0][p] != steps[1][p]), count)
    alike = next((p for p in range(count - first) if steps[0][-1 - p] != steps[1][-1 - p]), count - first)
    stop = len(graph.events) - alike
    uses = [q for p in range(first, stop) for n in graph.made(p) for q in graph.consumers.get(n, ())]
    if first >= stop:
        return []
    return [_span(graph, [first, stop - 1, *uses], "what is called follows from a size that follows from values")]


def path_of_the_next_forward(graph: ModelGraph, following: ModelGraph, slots: Sequence[Slot]) -> list[Span]:
    """What keeps calls in one stage that go another way in the forward that follows, for what modules keep. Such a call is not
    looked into then, or a call around it: a module that keeps a table in its first call, and takes it in its second, goes
    another way within the module that calls it twice.

    Raises:
        PlanError: the way is another one in calls that stages look into.
    """
    events, next_events = (_events_by_call(g) for g in (graph, following))
    spans = []
    for path in [p for p in dict.fromkeys((*events, *next_events)) if events.get(p) != next_events.get(p)]:
        calls = [c for depth in range(len(path), 0, -1) if (c := graph.calls.get(path[:depth])) is not None]
        if not calls or any(c.acts for c in calls):
            continue  # (what follows from a value that is read is recorded again)
        around = next((c for c in calls if not _looked_into(graph, c)), None)
        if around is None:
            raise _other_way(graph, following, path, slots)
        around.visible = False  # what it has counted its stage alone uses, and alone counts
        spans.append(
            _span(graph, [around.start, around.stop - 1], f"{spelled(around.path)} goes another way next time")
        )
    return [s for s in spans if s.first < s.last]


def _looked_into(graph: ModelGraph, call: Call) -> bool:
    """Whether stages follow a call of which one stage runs all: the model's own, one that changes what others meet, and one
    whose values others take otherwise than from what it gave."""
    if call.path == ROOT or (call.visible and not call.counts) or call.fresh:
        return True
    inside = range(call.start, call.stop)
    told = {*call.outputs, *(n for grown in call.grown for n in grown.values)} - {*call.stashed}
    left = (n for p in inside for n in graph.made(p) if n not in told)
    return any(p not in inside for n in left for p in graph.consumers.get(n, ()))


def _events_by_call(graph: ModelGraph) -> dict[Path, list[tuple[str, tuple[Any, ...]]]]:
    events: dict[Path, list[tuple[str, tuple[Any, ...]]]] = {}
    for event in graph.events:
        shapes = tuple(None if n is None else graph.values[n].shape for n in event.outputs)
        events.setdefault(event.path, []).append((event.function, shapes))
    return events


def _other_way(graph: ModelGraph, following: ModelGraph, path: Path, slots: Sequence[Slot]) -> PlanError:
    """The error for a forward that goes another way than the one before it."""
    events = [[e for e in g.events if e.path == path] for g in (graph, following)]
    same = next(
        (i for i, (a, b) in enumerate(zip(*events, strict=False)) if a.function != b.function), min(map(len, events))
    )
    line = next((e[same].line for e in events[::-1] if same < len(e)), "")
    names = ", ".join(".".join(filter(None, slot)) for slot in slots[:3])
    return PlanError.of(
        "this plan",
        where=f"the model's {line or 'forward'}, in {spelled(path)}",
        given=f"a forward that goes another way than the one before it, for what that left in {names}",
        required="for a pipeline, what one forward leaves for the next to act on, kept and used in one module within the model",
        fix="mesh: {dp_shard: 2}",
    )


def told_in_backward(model: nn.Module, graph: ModelGraph) -> None:
    """Writes to the graph that a call of a module with backward hooks is not cut: on one device such a hook is called when the
    backward comes to the module, and finds there what its forward left."""
    for call in graph.calls.values():
        if call.path != ROOT and has_backward_hooks(model.get_submodule(call.module)):
            inside = [call.start, call.stop - 1]
            for beside in (call.start - 1, call.stop):  # torch's own, which tells when the backward comes to it
                event = graph.events[beside] if 0 <= beside < len(graph.events) else None
                if event is not None and (event.path, event.function) == (call.path[:-1], "view_as"):
                    inside.append(beside)
            span = _span(graph, inside, f"{call.module} has a backward hook")
            graph.spans += [span] if span.first < span.last else []


def _left_unseen(graph: ModelGraph) -> Iterator[Span]:
    """Calls that read a value are not looked into by other stages, and run unseen from there on by their own: what they leave
    otherwise than by returning or appending it, by a write in place say, is had by their stage alone."""
    for call in graph.calls.values():
        if not call.acts or call.path == ROOT:
            continue
        told = {*call.outputs, *(n for grown in call.grown for n in grown.values)}
        left = {n: p for p in range(call.start, call.stop) for n in graph.made(p) if n not in told}
        uses = [(left[n], p) for n in left for p in graph.consumers.get(n, ()) if p >= call.stop]
        if uses:
            read = min(
                p for p in range(call.start, call.stop) if graph.events[p].path == call.path and graph.events[p].reads
            )
            first = min(read, *(made for made, _ in uses))
            last = max(use for _, use in uses)
            yield _span(graph, [first, last], f"what {spelled(call.path)} leaves follows from a value that it reads")


def _drawn_from_one_generator(graph: ModelGraph) -> Iterator[Span]:
    """What draws from one generator, where a stage cannot draw along with another; else what keeps a stage from coming to
    the last draw: a value that is read, in a call of which it runs a part."""
    for generator, positions in graph.drawn_from.items():
        if generator not in graph.drawn_along:
            yield _span(graph, positions, "how often one generator is drawn from follows from more than shapes")
            continue
        for r, event in enumerate(graph.events):
            if event.reads and event.inputs and event.path != ROOT and r < positions[-1]:
                start = graph.calls[event.path].start
                yield _span(graph, [start, r], f"{spelled(event.path)} reads a value before a generator is drawn from")


def _drawn_as_values_decide(graph: ModelGraph) -> Iterator[Span]:
    """A call that reads a value runs on its stage alone: another does not know how many numbers of the host's it drew. What
    follows draws on from there; so does the next forward, if a module holds the generator."""
    for call in graph.calls.values():
        if call.acts and call.draws_host and call.path != ROOT:
            first = 0 if graph.draws_held else call.start
            why = f"how many random numbers {spelled(call.path)} draws may follow from a value that it reads"
            yield _span(graph, [first, len(graph.events) - 1], why)


def _differentiated(graph: ModelGraph) -> Iterator[Span]:
    """From the first use of that by which a gradient is asked for, whatever it was written to since, to where it is asked."""
    for position, values in graph.differentiated.items():
        first = 0
        if values is not None:
            names = {graph.values[n].name for n in values}
            numbers = (n for n, value in enumerate(graph.values) if value.name in names)
            first = min((p for n in numbers for p in graph.consumers.get(n, ())), default=0)
        yield _span(graph, [first, position], "the forward asks for a gradient itself")


def _names_of_written_memory(graph: ModelGraph, at_end: Iterable[int]) -> Iterator[Span]:
    """Where two names of a memory are in use at once, up to the last write to it."""
    writes: dict[int, int] = {}
    for position in range(len(graph.events)):
        for n in graph.writes(position):
            if graph.values[n].storage:
                writes[graph.values[n].storage] = position
    lives: dict[int, dict[int, list[int]]] = defaultdict(dict)  # memory → name → the event that made it, its last use
    outputs = {*graph.returned, *graph.calls[ROOT].outputs, *at_end}
    for number, value in enumerate(graph.values):
        if value.storage in writes:
            last = len(graph.events) if number in outputs else max(graph.consumers.get(number, ()), default=-1)
            life = lives[value.storage].setdefault(value.name, [value.position, last])
            life[0], life[1] = min(life[0], value.position), max(life[1], last)
    for memory, names in lives.items():
        last_write = writes[memory]
        reached = -1  # up to where a name made so far is in use
        for made, last in sorted(map(tuple, names.values())):
            stop = min(reached, last, last_write)
            if stop > made:
                line = graph.events[last_write].line
                yield Span(made, stop, f"a write in place to memory that has several names ({line})")
            reached = max(reached, last)
