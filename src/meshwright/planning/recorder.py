"""``Recorder``: writes down one forward as it runs: its calls, events and values, and what memory keeps together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.calls.hook import Forward
from meshwright.calls.structure import copied_structure, holds_code, lists_in, map_tensors, tensors_of
from meshwright.calls.tracer import Slot, Tracer, memory_of, slot_tensors
from meshwright.chance import drawn_from, host_drawn, host_generators
from meshwright.described import tensors_within
from meshwright.errors import PlanError
from meshwright.graph import ROOT, Call, Event, Grown, ModelGraph, Path, Segment, Span, Value
from meshwright.planning.attribute_uses import AttributeUses
from meshwright.planning.kept import contents
from meshwright.planning.kept_uses import KeptUses
from meshwright.planning.memory import Memory, Touches, keep_together, told_in_backward
from meshwright.planning.spent import Cost, Spent
from meshwright.private import storage_of, without_modes
from meshwright.spmd.autograd_functions import transforming
from meshwright.spmd.decide.gradient import ENGINES
from meshwright.spmd.losses import mean_target
from meshwright.spmd.torch_functions import LISTENING, SIZES, is_random, label_of, writes


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensor that a function writes to, if it does."""
    targets = args[:1] if writes(func, args, kwargs) else (kwargs.get("out"),)
    return [t for t in targets if isinstance(t, Tensor)]


def _names_of(took: Sequence[int], names: Mapping[int, str]) -> tuple[str, ...]:
    """The names that some of the tensors have, by their identity; each once."""
    return tuple(dict.fromkeys(names[i] for i in took if i in names))


class Recorder(Tracer):
    """Writes down a forward as it runs.

    Args:
        changed: where modules keep what the forward changes.
        sizes_read: how many sizes of values have been read so far.
        draws: whether the forward draws random numbers of Python's or NumPy's; then calls that do are told.
    """

    def __init__(
        self,
        model: nn.Module,
        changed: Sequence[Slot] = (),
        sizes_read: Callable[[], int] = lambda: 0,
        *,
        draws: bool = False,
    ) -> None:
        super().__init__(slot_tensors(model, changed))
        self.graph, self.cost, self.memory = ModelGraph(draws=draws), Cost(), Memory()
        self.uses = AttributeUses(model, changed, lambda: len(self.graph.events), lambda: self.frames[-1].path)
        self._model, self._sizes_read, self._held = model, sizes_read, host_generators(model)
        self._numbers = drawn_from(self._held)
        self.kept = KeptUses(model, changed, self.graph, self.uses)
        self._named: dict[int, list[Tensor]] = {}  # memory → the tensors in it that are values
        self._entered: dict[Path, int] = {}  # call → the ops that had run when it began
        self._count = 0  # of tensors that are values
        self.asked: set[int] = set()  # values whose sizes Python was told
        self.told: list[Any] = []  # the sizes that Python was told of other tensors
        self._parameters = {id(p): n for n, p in model.named_parameters()}
        self._parameter_memory = {storage_of(p): n for n, p in model.named_parameters() if p.layout is torch.strided}
        self._buffers = {id(b): n for n, b in model.named_buffers()}
        self._generators: dict[int, int] = {}  # id of a generator of the model's own, which ``cost`` holds → its number
        # Of the tensors that functions within the running event took, in order: id → number, if it is a value.
        self._within: dict[int, int | None] = {}
        # Tensors and storages are told apart by their address, which the next may get once one has gone: a buffer that
        # the forward puts another in place of, say.
        self._alive: list[Any] = [*model.parameters(), *model.buffers()]

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph, module = self.graph, forward.module
        call = graph.calls[path] = Call(path[-1][0], path, len(graph.events))
        call.leaf = next(module.children(), None) is None
        call.given = (args, kwargs)
        call.taken = tuple(tensors_of(call.given))
        self._entered[path] = self.memory.ticks
        had = set(map(id, call.taken))
        before, lists, tick = self._state(call.given), lists_in(call.given), self.memory.ticks
        lengths = [len(x) for x in lists]
        numbers = host_drawn(self._held) if graph.draws else None
        result = self._other_ways(call, module, self.follow(path, forward.run, args, kwargs))
        tensors = tensors_of(result)
        self._left_behind(call, module, args, kwargs)
        (given, slots), (given_now, slots_now) = before, self._state(call.given)
        call.visible = given != given_now or self._wrote_to_the_batch(tick)
        self.kept.changed_in[path] = [slot for slot in slots if slots[slot] != slots_now[slot]]
        call.draws_host = graph.draws and host_drawn(self._held) != numbers
        call.visible |= call.draws_host
        call.grown = tuple(
            Grown(i, x[n:], tuple(map(self.number, tensors_of(x[n:]))))
            for i, (x, n) in enumerate(zip(lists, lengths, strict=True)) if len(x) > n
        )  # fmt: skip
        call.acts = any(e.reads and e.inputs and e.path == path for e in graph.events[call.start :])
        # On another way it may draw, too.
        call.draws_host |= graph.draws and call.acts and bool(host_generators(module))
        call.stop, call.returned = (
            len(graph.events),
            copied_structure(result, {*map(id, args), *map(id, kwargs.values())}),
        )
        call.outputs = tuple(self.number(t) for t in tensors)
        call.fresh = holds_code((result, [grown.items for grown in call.grown])) or any(
            n is None and (id(t) not in had or isinstance(t, nn.Parameter))
            for n, t in zip(call.outputs, tensors, strict=True)
        )
        return result

    def _other_ways(self, call: Call, module: nn.Module, result: Any) -> Any:
        """Where a call reads a value, it may go another way than here (experts that no row was sent to): then it may take all
        that it was given, and what it gives have a gradient."""
        graph = self.graph
        reads = [p for p in range(call.start, len(graph.events))
                 if graph.events[p].path == call.path and graph.events[p].reads and graph.events[p].inputs]  # fmt: skip
        if not reads or call.path == ROOT:
            return result
        given = [n for t in tensors_of(call.given) if (n := self.number(t)) is not None]
        event = graph.events[reads[-1]]
        graph.events[reads[-1]] = replace(event, inputs=tuple(dict.fromkeys((*event.inputs, *given))))
        result = map_tensors(self._following, result)  # which it is follows from what was read
        graph.ways[reads[-1]] = tuple(n for t in tensors_of(result) if (n := self.number(t)) is not None)
        gradients = any(p.requires_grad for p in module.parameters()) or any(
            graph.values[n].requires_grad for n in given
        )

        def differentiable(t: Tensor) -> Tensor:
            number = self.number(t)
            if number is None or not gradients or t.requires_grad or not t.is_floating_point():
                return t
            made = _differentiable(t)
            self.name_value(made, number)
            graph.values[number] = replace(graph.values[number], requires_grad=True, is_leaf=False)
            self._alive.append(made)
            return made

        return map_tensors(differentiable, result)

    def _following(self, t: Tensor) -> Tensor:
        """A tensor that follows from the batch, as a value: another name for it, of its own."""
        if self.known(t) or isinstance(t, nn.Parameter):
            return t
        with without_modes():
            t = t.view_as(t)
        self._new(t, len(self.graph.events) - 1)
        return t

    def _state(self, arguments: Any) -> tuple[Any, dict[Slot, Any]]:
        """What a call may change otherwise than by what it returns: containers that it is given, and what modules keep."""
        return contents(arguments), self.kept.contents()

    def _wrote_to_the_batch(self, tick: int) -> bool:
        """Whether memory that was there at an op, and that follows from the batch alone, has been written since."""
        values = {*self._named, *self.shared, *self._parameter_memory}
        return any(self.memory.made.get(m, 0) <= tick for m in self.memory.since(tick) - values)

    def _left_behind(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the values that may be found again otherwise than in what the call returned, for it and all around it."""
        plain = [v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules", "forward")]
        left = {n for t in tensors_of([plain, args, kwargs]) if (n := self.number(t)) is not None}
        made = frozenset(n for n in left if self.graph.values[n].position >= call.start)
        if made:
            for depth in range(1, len(call.path) + 1):
                around = self.graph.calls[call.path[:depth]]
                around.stashed |= made

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        graph, place = self.graph, len(self.graph.events)
        named = tuple((i, self._new(t, place)) for i, t in enumerate(tensors) if self.unnumbered(t))
        inputs = tuple(n for t in tensors if (n := self.number(t)) is not None)
        tick, cost, sizes = self.memory.ticks, self.cost.so_far(), self._sizes_read()
        name, loss = label_of(func), mean_target(func, args, kwargs) is not None
        self._within.clear()
        result = _where_it_is(name, args, kwargs, func(*args, **kwargs))
        with without_modes():  # what is asked of tensors from here on is asked by us, thousands of times
            targets = _written_by(func, args, kwargs)
            named += (within := self._written_within(place, tick, tensors, targets))
            inputs += tuple(n for _, n in within)
            made = tensors_within(result)
            renamed = self._renumber(place, tick, tensors, targets, made)
            graph.outputs[path, index] = result
            listens = self._listens(func, inputs, place)
            took = [*map(id, tensors), *self._within]
            inside = [n for n in self._within.values() if n is not None and graph.values[n].position < place]
            graph.events.append(
                Event(
                    path=path,
                    index=index,
                    function=name,
                    inputs=tuple(dict.fromkeys((*inputs, *inside))) if inside else inputs,
                    outputs=tuple(map(self.number, made)),
                    written=self.number(targets[0]) if targets else None,
                    parameters=_names_of(took, self._parameters),
                    buffers=_names_of(took, self._buffers),
                    reads=(not made and not targets and not listens) or self._sizes_read() > sizes,
                    mean_loss=loss,
                    line=model_line(),
                    named=named,
                    renamed=renamed,
                    **self._spent_on(func, self.cost.since(cost)),
                )
            )
        if func in ENGINES:
            graph.differentiated[place] = self._differentiated(func, args, kwargs)
        return result

    def _spent_on(self, func: Any, spent: Spent) -> dict[str, Any]:
        """What an event took, by the names that it has in an ``Event``."""
        generators = tuple(dict.fromkeys(map(self._numbered_generator, spent.drawn_from)))
        draws = spent.draws > 0 or is_random(func)
        return {"flops": spent.flops, "moved": spent.moved, "draws": draws, "generators": generators}

    def _written_within(
        self, place: int, tick: int, tensors: list[Tensor], targets: list[Tensor]
    ) -> tuple[tuple[int, int], ...]:
        """Of what follows from the batch, what a function wrote to otherwise than as its target: an ``autograd.Function`` that
        marks it as dirty, say. It is a value from here on; (which of the event's tensors, number)."""
        written = self.memory.since(tick) - {memory_of(t) for t in targets}
        strangers = [
            (i, t) for i, t in enumerate(tensors)
            if memory_of(t) in written and not self.known(t) and not isinstance(t, nn.Parameter)
        ]  # fmt: skip
        for _, t in strangers:
            self.share(t)
        return tuple((i, self._new(t, place)) for i, t in strangers)

    def _listens(self, func: Any, inputs: tuple[int, ...], place: int) -> bool:
        """Whether an event waits for the gradient of what it is given: the value is made in the stage of the event."""
        if func not in LISTENING or not inputs:
            return False
        made = min(self.graph.values[n].position for n in inputs)
        self.graph.listening.append(place)
        self.graph.spans.append(Span(made, place, f"{func.__name__} waits for a gradient ({model_line()})"))
        return True

    def _differentiated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
        """The values by which a gradient is asked for, by their numbers; None if it is asked for by something else too."""
        by = kwargs.get("inputs", args[1] if len(args) > 1 else None) if func is torch.autograd.grad else None
        numbers = [self.number(t) for t in tensors_of(by)]
        return None if not numbers or None in numbers else tuple(n for n in numbers if n is not None)

    def _renumber(
        self, place: int, tick: int, tensors: list[Tensor], targets: list[Tensor], given: list[Tensor]
    ) -> tuple[tuple[int, int], ...]:
        """New numbers for what an event gave and for all names of the memory that it wrote to; (before, now) of names other
        than its targets.

        Args:
            tick: when it began.
            tensors: what it took; ``targets``: of these, what it wrote to; ``given``: what it gave.
        """
        foreign = {memory_of(t) for t in targets if not self.marked(t) and not isinstance(t, nn.Parameter)} - {0}
        written = self.memory.since(tick) | {memory_of(t) for t in targets}
        others = [t for m in written for t in self._named.get(m, ()) if not any(t is x for x in targets)]
        for t in targets:
            self._new(t, place)
        renamed = tuple((self._numbered(t), self._new(t, place)) for t in others)
        self.renamed |= dict(renamed)
        for t in given:
            if not isinstance(t, nn.Parameter) and not any(t is x for x in (*targets, *tensors)):
                self._new(t, place)
        self._touch(place, tensors, foreign, written)
        return renamed

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An ``autograd.Function``. Of torch's own (a module's backward hook) the events within do not know yet that what they
        give will have a gradient."""
        result = super().custom(apply, function, args, kwargs)
        self.graph.own_backwards |= not function.__module__.startswith("torch.")
        for t in tensors_of(result):
            if t.requires_grad and (number := self.number(t)) is not None:
                self.graph.values[number] = replace(self.graph.values[number], requires_grad=True, is_leaf=False)
        return result

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``. Of sizes it is noted that Python has them."""
        if func not in SIZES:
            return func(*args, **kwargs)
        size = func(*args, **kwargs)
        if (number := self.number(args[0])) is None:
            self.told.append(size)
        else:
            self.asked.add(number)
        return size

    def transformed(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``. Without values, a gradient that a transform gives does not know that it has one itself."""

        def following(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if transforming() or self.closed != 1 or not torch.is_grad_enabled():
                return result
            within = dict(self._within)  # (to ask a tensor anything is a function within, too)
            values = [n for n in within.values() if n is not None]
            given = any(t.requires_grad for t in tensors_of((args, kwargs)))
            if (
                given
                or any(i in self._parameters for i in within)
                or any(self.graph.values[n].requires_grad for n in values)
            ):
                return map_tensors(_differentiable, result)
            return result

        return super().transformed(following, name, args, kwargs)

    def untraceable(self, function: str) -> None:
        """See ``Tracer``."""
        raise PlanError.of(
            "this plan",
            where=f"the model's {model_line() or 'forward'}",
            given=f"{function} of what follows from parameters, within another transform, or with a function as its result",
            required="for a pipeline or branches, transforms of torch.func whose results are tensors: vmap, grad, jvp",
            fix="mesh: {dp_shard: 2}",
        )

    def segment_begins(self, segment: Segment) -> bool:
        self.graph.segments[segment] = len(self.graph.events), len(self.graph.events)
        return False  # values have the graph that they have in a backward

    def segment_ends(self, segment: Segment) -> None:
        self.graph.segments[segment] = self.graph.segments[segment][0], len(self.graph.events)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function within a custom ``autograd.Function``, or within what ``torch.func`` made: the event takes the parameters
        and values that it uses, of modules that it calls, say."""
        self._within |= {id(t): self.number(t) for t in tensors_within((args, kwargs))}
        return func(*args, **kwargs)

    def _touch(self, place: int, tensors: list[Tensor], foreign: set[int], written: set[int]) -> None:
        """Notes the use of shared memory; ``foreign``: what is about to be shared, as it was written."""
        for memory in {memory_of(t) for t in tensors} | foreign:
            if memory in self.shared or memory in foreign:
                touched = self.kept.touched.setdefault(memory, Touches())
                touched.used.append(place)
                if memory in written:
                    touched.changed.append(place)

    def _numbered_generator(self, generator: torch.Generator) -> int:
        return self._generators.setdefault(id(generator), len(self._generators))

    def _numbered(self, t: Tensor) -> int:
        number = self.number(t)
        assert number is not None
        return number

    def _new(self, t: Tensor, place: int) -> int:
        """A new number for a tensor: an event gave it, or something was written to its memory."""
        storage, before, strided = 0, self.number(t), t.layout is torch.strided
        if strided:
            storage = storage_of(t)
            self._alive.append(t.untyped_storage())
        self._count += before is None
        known = None if before is None else self.graph.values[before]
        name = self._count if known is None else known.name
        # A write without gradients, to whatever name of the memory, leaves what has a gradient with it.
        is_leaf = t.requires_grad and not torch.is_grad_enabled() if known is None else known.is_leaf
        shape = tuple(t.shape) if strided else tuple(n if type(n) is int else 0 for n in t.shape)
        value = Value(
            shape, tuple(t.stride()) if strided else (), str(t.dtype).removeprefix("torch."),
            t.element_size(), t.requires_grad, place, storage, name, is_leaf=is_leaf, strided=strided,
        )  # fmt: skip
        if storage and before is None:
            self._named.setdefault(storage, []).append(t)
        number = len(self.graph.values)
        self.graph.values.append(value)
        self.name_value(t, number)
        self._alive.append(t)
        return number

    def finish(self) -> None:
        """After the forward: what memory keeps together."""
        graph, kept = self.graph, self.kept
        graph.draws_held = drawn_from(self._held) != self._numbers
        slots = kept.tell(self.known)
        carried = kept.memories(slots)
        foreign = {m: t for m, t in kept.touched.items() if m not in carried}
        for memory, touched in kept.touched.items():
            for path, call in graph.calls.items():
                inside = range(call.start, call.stop)
                there_before = self.memory.made.get(memory, 0) <= self._entered.get(path, 0)
                if there_before and any(p in inside for p in touched.changed):
                    call.visible |= any(p not in inside for p in touched.used)
        for path, changed in kept.changed_in.items():
            shown = [slot for slot in changed if not kept.is_private(slot, path)]
            call = graph.calls[path]
            call.counts = not call.visible and bool(shown) and all(kept.is_own_count(slot, path) for slot in shown)
            call.visible |= bool(shown)
        held = [t for slot in slots for t in slot_tensors(self._model, [slot])]
        at_end = [n for t in held if (n := self.number(t)) is not None]
        parameters = self._written_parameters()
        graph.parameter_writes = {name: max(touched.changed, default=-1) for name, touched in parameters.items()}
        keep_together(graph, foreign, slots, parameters, at_end)
        told_in_backward(self._model, graph)

    def _written_parameters(self) -> dict[str, Touches]:
        """The parameters that the forward wrote, with the events that use them."""
        touches = {}
        for memory in self.memory.written.keys() & self._parameter_memory.keys():
            name = self._parameter_memory[memory]
            values = {n for n, value in enumerate(self.graph.values) if value.storage == memory}
            used = [p for p, e in enumerate(self.graph.events) if name in e.parameters or values.intersection(e.inputs)]
            touches[name] = Touches(used, used)
        return touches


def _differentiable(t: Tensor) -> Tensor:
    """A tensor as one with a gradient; no leaf, which the model could not write to."""
    if t.requires_grad or not t.is_floating_point():
        return t
    with without_modes():
        return t.detach().requires_grad_().clone()


def _where_it_is(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """``result``; of what is moved to the device that it will be on (``self.scale.to(x.device)``, with a parameter on meta) the
    very thing."""
    x = args[0] if args else None
    if name not in ("to", "cpu", "cuda") or not isinstance(x, Tensor) or not isinstance(result, Tensor):
        return result
    same = x.is_meta and result.dtype == x.dtype and not kwargs.get("copy") and "memory_format" not in kwargs
    return x if same else result
