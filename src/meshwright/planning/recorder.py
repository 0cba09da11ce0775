"""``ForwardRecorder``: records one forward while it runs: its calls, events and values, and the spans that must stay in one
stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line, variables_below
from meshwright.calls.changes import Holders, holders_in
from meshwright.calls.hook import Forward
from meshwright.calls.structure import copied_structure, holds_code, map_tensors, tensors_of
from meshwright.calls.tracer import Slot, Tracer, is_hook_node, memory_of, slot_tensors
from meshwright.chance import drawn_from, host_drawn, host_generators
from meshwright.described import nbytes_of, tensors_within
from meshwright.errors import PlanError
from meshwright.graph import ROOT, Call, Event, ModelGraph, Path, Segment, Span, Value
from meshwright.planning.attribute_uses import AttributeUses
from meshwright.planning.cost import Cost, OpCounts
from meshwright.planning.memory import Memory, Touches, keep_together, told_in_backward
from meshwright.planning.module_state import own_attributes
from meshwright.planning.slot_uses import SlotUses
from meshwright.private import storage_of, storage_within, without_modes
from meshwright.spmd.autograd_functions import transforming
from meshwright.spmd.decide.gradient import ENGINES
from meshwright.spmd.losses import mean_target
from meshwright.spmd.torch_functions import BY_DEVICE, LISTENING, SET_DATA, SIZES, is_random, label_of, target_of


def _names_of(ids: Sequence[int], names: Mapping[int, str]) -> tuple[str, ...]:
    """The names of the tensors that have one, each once. ``ids``: ``id`` of each tensor; ``names``: id → name."""
    return tuple(dict.fromkeys(names[i] for i in ids if i in names))


class ForwardRecorder(Tracer):
    """Records a forward while it runs.

    Args:
        changed: the slots that the forward changes. Their tensors are values from the start.
        sizes_read: returns how many sizes that depend on values have been read so far.
        draws: whether the forward draws random numbers from Python or NumPy. Then the calls that draw are recorded.

    Attributes:
        graph: the recorded forward.
        cost: counts flops, bytes and draws; ``memory``: which memory ops write; ``uses``: uses of attributes. The caller
            enters all three modes.
        slot_uses: uses and changes of the slots.
        asked: numbers of the values whose sizes Python has read.
        told: the sizes of other tensors that Python has read, in order.
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
        self.uses = AttributeUses(
            model, changed, lambda: len(self.graph.events), lambda: self.frames[-1].path, lambda: self.closed > 0
        )
        self._model, self._sizes_read, self._generators_of_host = model, sizes_read, host_generators(model)
        self._numbers = drawn_from(self._generators_of_host)
        self.slot_uses = SlotUses(model, changed, self.graph, self.uses)
        self._named: dict[int, list[Tensor]] = {}  # memory → the tensors in it that are values
        self._entered: dict[Path, int] = {}  # call → how many ops had run when it began
        self._count = 0  # how many tensors are values
        self._on_modules: set[int] = set()  # values that attributes of modules held when a call ended
        self._older: dict[int, Any] = {}  # id → container or object that is older than the forward
        self.asked: set[int] = set()
        self.told: list[Any] = []
        self._parameters = {id(p): n for n, p in model.named_parameters()}
        self._parameter_memory = {storage_of(p): n for n, p in model.named_parameters() if p.layout is torch.strided}
        self._buffers = {id(b): n for n, b in model.named_buffers()}
        self._buffer_memory: dict[int, list[str]] = {}
        for name, buffer in model.named_buffers():
            self._buffer_memory.setdefault(memory_of(buffer), []).append(name)
        self._generators: dict[int, int] = {}  # id of a generator of the model's own, which ``cost`` holds → its number
        # The tensors that functions within the running event used, in order: id → number, None if it is no value.
        self._within: dict[int, int | None] = {}
        self._hidden: dict[int, Tensor] = {}  # of these, the values
        # Parameter → the last event before each assignment of its data.
        self._assigned: dict[str, list[int]] = {}
        # (Memory, position, name) of the model's own functions that use shared memory which is no argument of theirs.
        self._read_by_backwards: list[tuple[int, int, str]] = []
        # Tensors and storages are identified by their address. They are kept here so that no new one gets the address of
        # one that was freed (a buffer that the forward replaces, for example).
        self._alive: list[Any] = [*model.parameters(), *model.buffers()]

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph, module = self.graph, forward.module
        call = graph.calls[path] = Call(path[-1][0], path, len(graph.events))
        call.leaf = next(module.children(), None) is None
        call.arguments = (args, kwargs)
        call.argument_tensors = tuple(tensors_of(call.arguments))
        call.inputs = frozenset(n for t in call.argument_tensors if (n := self.number(t)) is not None)
        self._entered[path] = self.memory.ticks
        arguments = set(map(id, call.argument_tensors))
        if path == ROOT:  # what is older than the forward: its batch, and what modules keep
            attributes = [vars(m)[key] for m in self._model.modules() for key in own_attributes(vars(m))]
            self._older = holders_in([attributes, args, kwargs])
        holders, slots, tick = Holders(call.arguments), self.slot_uses.contents(), self.memory.ticks
        numbers = host_drawn(self._generators_of_host) if graph.draws else None
        try:
            followed = self.follow(path, forward.run, args, kwargs)
        except Exception:  # the model may try another way
            call.raised, call.stop = True, len(graph.events)
            raise
        result = self._other_ways(call, module, followed)
        tensors = tensors_of(result)
        self._left_behind(call, module, args, kwargs)
        call.changes, complete, call.repeatable = holders.changes(self.number, self._older)
        # Who takes a value from where the call left it finds it there, on every stage; unless a module keeps it as well.
        call.stashed -= {n for change in call.changes for n in change.values if n not in self._on_modules}
        slots_now = self.slot_uses.contents()
        written = self._written_outside(tick)
        call.visible = not complete or bool(written)
        call.untold = not complete or not written <= self._buffer_memory.keys()
        self.slot_uses.changed_in[path] = [slot for slot in slots if slots[slot] != slots_now[slot]]
        call.draws_host = graph.draws and host_drawn(self._generators_of_host) != numbers
        call.visible |= call.draws_host
        call.acts = any(e.reads and e.inputs and e.path == path for e in graph.events[call.start :])
        # With other values, its path may be one that draws.
        call.draws_host |= graph.draws and call.acts and bool(host_generators(module))
        call.stop = len(graph.events)
        call.returned = copied_structure(result, {*map(id, args), *map(id, kwargs.values())})
        call.outputs = tuple(self.number(t) for t in tensors)
        call.fresh = holds_code((result, [change.items for change in call.changes])) or any(
            n is None and (id(t) not in arguments or isinstance(t, nn.Parameter))
            for n, t in zip(call.outputs, tensors, strict=True)
        )
        return result

    def _other_ways(self, call: Call, module: nn.Module, result: Any) -> Any:
        """The result of a call that reads a value, so that it holds for every path that the call may take.

        With other values the call may take another path (experts that get no row here). It may then use all of its arguments,
        so they become inputs of the read, as does what it returns; and its result may have a gradient, so the result gets one.
        """
        graph = self.graph
        reads = [p for p in range(call.start, len(graph.events))
                 if graph.events[p].path == call.path and graph.events[p].reads and graph.events[p].inputs]  # fmt: skip
        if not reads or call.path == ROOT:
            return result
        arguments = [n for t in tensors_of(call.arguments) if (n := self.number(t)) is not None]
        returned = [n for t in tensors_of(result) if (n := self.number(t)) is not None]
        results = [n for n in returned if graph.values[n].position < reads[0]]
        event = graph.events[reads[-1]]
        graph.events[reads[-1]] = replace(event, inputs=tuple(dict.fromkeys((*event.inputs, *arguments, *results))))
        # The value that was read decides which tensor is returned: also where the recorded path returns an older one.
        result = map_tensors(partial(self._as_value, before=reads[0]), result)
        graph.ways[reads[-1]] = tuple(n for t in tensors_of(result) if (n := self.number(t)) is not None)
        has_gradient = any(p.requires_grad for p in module.parameters())
        has_gradient = has_gradient or any(graph.values[n].requires_grad for n in arguments)

        def differentiable(t: Tensor) -> Tensor:
            number = self.number(t)
            if number is None or not has_gradient or t.requires_grad or not t.is_floating_point():
                return t
            copy = _differentiable(t)
            self.name_value(copy, number)
            graph.values[number] = replace(graph.values[number], requires_grad=True, is_leaf=False)
            self._alive.append(copy)
            return copy

        return map_tensors(differentiable, result)

    def _as_value(self, t: Tensor, before: int) -> Tensor:
        """A value for a tensor that was made before a position, or is computed from the batch alone: a view of it, with its own
        number. Others are unchanged."""
        number = self.number(t)
        late = number is not None and self.graph.values[number].position >= before
        if late or isinstance(t, nn.Parameter) or self.is_unnumbered(t):
            return t
        with without_modes(), torch.enable_grad():
            t = t.view_as(t)
        self._new(t, len(self.graph.events) - 1)
        return t

    def _written_outside(self, tick: int) -> set[int]:
        """The older memory, computed from the batch alone or of buffers, to which ops after number ``tick`` wrote."""
        values = {*self._named, *self.shared, *self._parameter_memory}
        return {m for m in self.memory.since(tick) - values if self.memory.allocated.get(m, 0) <= tick}

    def _left_behind(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds to ``stashed`` of a call, and of the calls around it, the values that the call made and that can be reached
        without its result: from attributes of its module, or from its arguments."""
        attributes = [v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules", "forward")]
        on_module = {n for t in tensors_of(attributes) if (n := self.number(t)) is not None}
        self._on_modules |= on_module
        reachable = on_module | {n for t in tensors_of([args, kwargs]) if (n := self.number(t)) is not None}
        stashed = frozenset(n for n in reachable if self.graph.values[n].position >= call.start)
        if stashed or on_module:
            for depth in range(1, len(call.path) + 1):
                around = self.graph.calls[call.path[:depth]]
                around.stashed |= stashed
                around.inputs -= on_module

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        graph, position = self.graph, len(self.graph.events)
        named = tuple((i, self._new(t, position)) for i, t in enumerate(tensors) if self.is_unnumbered(t))
        inputs = tuple(n for t in tensors if (n := self.number(t)) is not None)
        tick, cost, sizes = self.memory.ticks, self.cost.so_far(), self._sizes_read()
        name, loss = label_of(func), mean_target(func, args, kwargs) is not None
        self._within.clear()
        self._hidden.clear()
        result = _without_move(name, args, kwargs, func(*args, **kwargs))
        # From here on we read facts of tensors ourselves, thousands of times: no mode is to see it.
        with without_modes():
            target = target_of(func, args, kwargs)
            targets = [] if target is None else [target]
            named += (within := self._written_within(position, tick, tensors, targets))
            inputs += tuple(n for _, n in within)
            outputs = tensors_within(result)
            renamed = self._renumber(position, tick, tensors, targets, outputs)
            graph.outputs[path, index] = result
            listens = self._listens(func, inputs, position)
            used = [*map(id, tensors), *self._within]
            inside = [n for n in self._within.values() if n is not None and graph.values[n].position < position]
            graph.events.append(
                Event(
                    path=path,
                    index=index,
                    function=name,
                    inputs=tuple(dict.fromkeys((*inputs, *inside))) if inside else inputs,
                    outputs=tuple(map(self.number, outputs)),
                    written=self.number(targets[0]) if targets else None,
                    parameters=_names_of(used, self._parameters),
                    buffers=self._buffers_of(used, targets),
                    reads=(not outputs and not targets and not listens) or self._sizes_read() > sizes,
                    mean_loss=loss,
                    line=model_line(),
                    named=named,
                    renamed=renamed,
                    **self._spent_on(func, self.cost.since(cost), (*tensors, *outputs)),
                )
            )
            event = graph.events[-1]
            if event.reads and event.inputs and not any(graph.events[p].path == path for p in graph.held):
                graph.held[position] = self._held(path)
        if func in ENGINES:
            graph.differentiated[position] = self._differentiated(func, args, kwargs)
        return result

    def _held(self, path: Path) -> frozenset[int]:
        """The values in local variables of the call with this path, and of the functions that run within it."""
        code = ForwardRecorder.entered.__code__
        variables = variables_below(code, lambda frame: frame.f_locals["path"] == path)
        held = [v for v in variables if not isinstance(v, nn.Module)]
        return frozenset(n for t in tensors_of(held) if (n := self.number(t)) is not None)

    def _buffers_of(self, used: Sequence[int], targets: Sequence[Tensor]) -> tuple[str, ...]:
        """The buffers that an event uses, or writes to through a view. ``used``: ``id`` of each tensor that it uses."""
        written = [name for t in targets if (m := memory_of(t)) for name in self._buffer_memory.get(m, ())]
        return tuple(dict.fromkeys((*_names_of(used, self._buffers), *written)))

    def _spent_on(self, func: Any, spent: OpCounts, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The counts of an event, as keyword arguments of ``Event``. ``tensors``: those that it takes and returns."""
        generators = tuple(dict.fromkeys(map(self._numbered_generator, spent.drawn_from)))
        draws = spent.draws > 0 or is_random(func)
        # Meta tensors have no kernel for attention: they compute all of its weights.
        moved = nbytes_of(tensors) if func in BY_DEVICE else spent.moved
        return {"flops": spent.flops, "moved": moved, "draws": draws, "generators": generators}

    def _written_within(
        self, position: int, tick: int, tensors: list[Tensor], targets: list[Tensor]
    ) -> tuple[tuple[int, int], ...]:
        """New values for tensors that are computed from the batch alone and that a function wrote to although they are no
        targets (an ``autograd.Function`` marks them as dirty, for example).

        Returns:
            (index among the event's tensors, the number that the tensor has before the write).
        """
        written = self.memory.since(tick) - {memory_of(t) for t in targets}
        strangers = [
            (i, t) for i, t in enumerate(tensors)
            if memory_of(t) in written and not self.is_value(t) and not isinstance(t, nn.Parameter)
        ]  # fmt: skip
        for _, t in strangers:
            self.share_memory(t)
        return tuple((i, self._new(t, position)) for i, t in strangers)

    def _listens(self, func: Any, inputs: tuple[int, ...], position: int) -> bool:
        """Whether an event registers a hook for the gradient of its input. If so, adds a span: the input's event and this
        one must be in one stage."""
        if func not in LISTENING or not inputs:
            return False
        first = min(self.graph.values[n].position for n in inputs)
        self.graph.listening.append(position)
        self.graph.spans.append(Span(first, position, f"{func.__name__} waits for a gradient ({model_line()})"))
        return True

    def _differentiated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
        """The numbers of the values with respect to which a gradient is taken; None if not all of its inputs are values."""
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None) if func is torch.autograd.grad else None
        numbers = [self.number(t) for t in tensors_of(inputs)]
        return None if not numbers or None in numbers else tuple(n for n in numbers if n is not None)

    def _renumber(
        self, position: int, tick: int, tensors: list[Tensor], targets: list[Tensor], outputs: list[Tensor]
    ) -> tuple[tuple[int, int], ...]:
        """Gives new numbers to an event's results and to all values in memory that it wrote to.

        Args:
            place: the event's position.
            tick: the number of the last op before the event.
            tensors: its inputs; ``targets``: those that it wrote to; ``outputs``: its results.

        Returns:
            (number before, number now) of the values in written memory that are not targets.
        """
        foreign = {memory_of(t) for t in targets if not self.is_marked(t) and not isinstance(t, nn.Parameter)} - {0}
        written = self.memory.since(tick) | {memory_of(t) for t in targets}
        others = [t for m in written for t in self._named.get(m, ()) if not any(t is x for x in targets)]
        for t in targets:
            self._new(t, position)
        renamed = tuple((self._numbered(t), self._new(t, position)) for t in others)
        self.renamed |= dict(renamed)
        for t in outputs:
            if not isinstance(t, nn.Parameter) and not any(t is x for x in (*targets, *tensors)):
                self._new(t, position)
        self._touch(position, [*tensors, *self._hidden.values()], foreign, written)
        return renamed

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an ``autograd.Function``, then records which of its results require gradients: the events within could not know
        (an example is ``view_as`` within torch's own Function for backward hooks of modules)."""
        position = len(self.graph.events)
        result = super().custom(apply, function, args, kwargs)
        if is_hook_node(function) and position < len(self.graph.events):
            self.graph.hook_nodes.append((position, len(self.graph.events) - 1))
        of_the_model = not function.__module__.startswith("torch.")
        self.graph.own_backwards |= of_the_model
        if of_the_model and position < len(self.graph.events):
            hidden = {memory_of(t) for t in self._hidden.values()} & self.shared.keys()
            self._read_by_backwards += [(memory, position, function.__name__) for memory in hidden]
        for t in tensors_of(result):
            if t.requires_grad and (number := self.number(t)) is not None:
                self.graph.values[number] = replace(self.graph.values[number], requires_grad=True, is_leaf=False)
        return result

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``. Records each size that Python reads, and each ``p.data = value`` of a parameter."""
        if func == SET_DATA and (name := self._parameters.get(id(args[0]))) is not None:
            self._assigned.setdefault(name, []).append(len(self.graph.events) - 1)
        if func not in SIZES:
            return func(*args, **kwargs)
        size = func(*args, **kwargs)
        if (number := self.number(args[0])) is None:
            self.told.append(size)
        else:
            self.asked.add(number)
        return size

    def transformed(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``. On meta, a gradient that a transform of ``torch.func`` returns has no gradient itself, though it
        has one on a device: the results get one if an input or a used parameter has one."""

        def following(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if transforming() or self.closed != 1 or not torch.is_grad_enabled():
                return result
            within = dict(self._within)  # a copy: reading ``requires_grad`` adds to it
            values = [n for n in within.values() if n is not None]
            has_gradient = any(t.requires_grad for t in tensors_of((args, kwargs)))
            has_gradient = has_gradient or any(i in self._parameters for i in within)
            has_gradient = has_gradient or any(self.graph.values[n].requires_grad for n in values)
            return map_tensors(_differentiable, result) if has_gradient else result

        return super().transformed(following, name, args, kwargs)

    def is_hiding(
        self, code_call: Segment, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """See ``Tracer``. Calls it to see what it uses."""
        self._within.clear()
        self._hidden.clear()
        cost = self.cost.so_far()
        self.untraced(call, *args, **kwargs)
        draws = self.cost.since(cost).draws > 0
        hides = draws or bool(self._hidden) or any(i in self._parameters for i in self._within)
        if hides:
            self.graph.hiding.add(code_call)
        return hides

    def untraceable(self, function: str) -> None:
        """See ``Tracer``."""
        raise PlanError.of(
            "this plan",
            where=f"the model's {model_line() or 'forward'}",
            given=f"{function} of values that parameters made, within another transform, or with a function as its result",
            required="for a pipeline or branches, transforms of torch.func whose results are tensors: vmap, grad, jvp",
            fix="mesh: {dp_shard: 2}",
        )

    def segment_begins(self, segment: Segment, *, reentrant: bool) -> bool:
        self.graph.segments[segment] = len(self.graph.events), len(self.graph.events)
        return False  # run the segment as it is, so that values have the autograd graph that they have in its recomputation

    def segment_ends(self, segment: Segment) -> None:
        self.graph.segments[segment] = self.graph.segments[segment][0], len(self.graph.events)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function within a custom ``autograd.Function`` or a transform of ``torch.func``. Its parameters and
        values become inputs of the event."""
        tensors = tensors_within((args, kwargs))
        self._within |= {id(t): self.number(t) for t in tensors}
        self._hidden |= {id(t): t for t in tensors if self.is_value(t)}
        return func(*args, **kwargs)

    def _touch(self, position: int, tensors: list[Tensor], foreign: set[int], written: set[int]) -> None:
        """Records the event's use of shared memory; ``foreign``: memory that becomes shared because the event wrote to it."""
        for memory in {memory_of(t) for t in tensors} | foreign:
            if memory in self.shared or memory in foreign:
                touched = self.slot_uses.touched.setdefault(memory, Touches())
                touched.used.append(position)
                if memory in written:
                    touched.changed.append(position)

    def _numbered_generator(self, generator: torch.Generator) -> int:
        return self._generators.setdefault(id(generator), len(self._generators))

    def _numbered(self, t: Tensor) -> int:
        number = self.number(t)
        assert number is not None
        return number

    def _new(self, t: Tensor, position: int) -> int:
        """Gives a tensor a new number: event ``place`` returned the tensor, or wrote to its memory."""
        storage, before, strided = 0, self.number(t), t.layout is torch.strided
        if strided:
            storage = storage_of(t)
            self._alive.append(storage_within(t))
        self._count += before is None
        known = None if before is None else self.graph.values[before]
        name = self._count if known is None else known.name
        # A new tensor with ``requires_grad`` under ``no_grad`` is a leaf. A write in place does not change whether it is one.
        is_leaf = t.requires_grad and not torch.is_grad_enabled() if known is None else known.is_leaf
        shape = tuple(t.shape) if strided else tuple(n if type(n) is int else 0 for n in t.shape)
        value = Value(
            shape, tuple(t.stride()) if strided else (), str(t.dtype).removeprefix("torch."),
            t.element_size(), t.requires_grad, position, storage, name, is_leaf=is_leaf, strided=strided,
        )  # fmt: skip
        if storage and before is None:
            self._named.setdefault(storage, []).append(t)
        number = len(self.graph.values)
        self.graph.values.append(value)
        self.name_value(t, number)
        self._alive.append(t)
        return number

    def finish(self) -> None:
        """Called after the forward: completes the calls, and adds the spans that must stay in one stage."""
        graph, slot_uses = self.graph, self.slot_uses
        graph.draws_held = drawn_from(self._generators_of_host) != self._numbers
        slots = slot_uses.tell(self.is_value)
        carried = slot_uses.memories(slots)
        foreign = {m: t for m, t in slot_uses.touched.items() if m not in carried}
        for memory, position, name in self._read_by_backwards:
            positions = (*slot_uses.touched[memory].used, position)
            if slot_uses.touched[memory].changed:  # its backward may read what is there then, which no other stage has
                graph.spans.append(
                    Span(min(positions), max(positions), f"{name} uses a tensor that the forward changes")
                )
        for memory, touched in slot_uses.touched.items():
            for path, call in graph.calls.items():
                inside = range(call.start, call.stop)
                there_before = self.memory.allocated.get(memory, 0) <= self._entered.get(path, 0)
                if there_before and any(p in inside for p in touched.changed):
                    call.visible |= any(p not in inside for p in touched.used)
        for path, changed in slot_uses.changed_in.items():
            shown = [slot for slot in changed if not slot_uses.is_private(slot, path)]
            call = graph.calls[path]
            call.counts = not call.visible and bool(shown) and all(slot_uses.is_own_count(slot, path) for slot in shown)
            call.visible |= bool(shown)
        slot_contents = [t for slot in slots for t in slot_tensors(self._model, [slot])]
        at_end = [n for t in slot_contents if (n := self.number(t)) is not None]
        parameters = self._written_parameters()
        graph.parameter_writes = {name: max(touched.changed, default=-1) for name, touched in parameters.items()}
        keep_together(graph, foreign, slots, parameters, at_end)
        told_in_backward(self._model, graph)

    def _written_parameters(self) -> dict[str, Touches]:
        """Parameter that the forward wrote → the events that use it, and those after which its data was assigned. Each counts
        as a change."""
        touches, events = {}, self.graph.events
        memories = {name: memory for memory, name in self._parameter_memory.items()}
        written = {self._parameter_memory[m] for m in self.memory.written.keys() & self._parameter_memory.keys()}
        for name in sorted(written | self._assigned.keys()):
            values = {n for n, value in enumerate(self.graph.values) if value.storage == memories.get(name)}
            used = {p for p, e in enumerate(events) if name in e.parameters or values.intersection(e.inputs)}
            used |= {max(0, position) for position in self._assigned.get(name, ())}
            touches[name] = Touches(sorted(used), sorted(used))
        return touches


def _differentiable(t: Tensor) -> Tensor:
    """A copy of a tensor with a gradient. It is no leaf, since a model may not write to a leaf in place."""
    if t.requires_grad or not t.is_floating_point():
        return t
    with without_modes():
        return t.detach().requires_grad_().clone()


def _without_move(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The result of a function; for a move to a device (``self.scale.to(x.device)``) that changes nothing in a run, the tensor
    itself. On meta, such a move makes a copy, though the parameter will be on that device."""
    x = args[0] if args else None
    if name not in ("to", "cpu", "cuda") or not isinstance(x, Tensor) or not isinstance(result, Tensor):
        return result
    same = x.is_meta and result.dtype == x.dtype and not kwargs.get("copy") and "memory_format" not in kwargs
    return x if same else result
