"""``capture``: one forward of a model, recorded as a ``ModelGraph``. Parameters have shapes only; nothing is computed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import meshwright
from meshwright.graph import ROOT, Call, Event, ModelGraph, Path, Value
from meshwright.planning.shadow import Meeting, Shadow
from meshwright.private import TorchDispatchMode, pytree, storage_of, version, without_modes
from meshwright.view.losses import mean_target
from meshwright.view.rules.registry import writes
from meshwright.view.structure import map_tensors, tensors_of
from meshwright.view.walk import Walk, following


def capture(model: nn.Module, run: Callable[[nn.Module], Any]) -> ModelGraph:
    """The graph of a forward.

    Args:
        model: with parameters on meta; its forwards are followed for the time of the call.
        run: runs the model's forward on a batch, and the loss on its output; what it returns are the results.
    """
    recorder, shadow, meeting = Recorder(model), Shadow(), Meeting()
    with torch.enable_grad(), recorder.cost, shadow, meeting, following(model, recorder):
        result = run(model)
    recorder.graph.of_this_batch = shadow.known + meeting.known > 0
    recorder.graph.returned = tuple(n for t in tensors_of(result) if (n := recorder.number(t)) is not None)
    return recorder.graph


@contextmanager
def computing_in(model: nn.Module, precision: str) -> Iterator[None]:
    """For the time of a capture, parameters and inputs are of the type that FSDP2's mixed precision computes in."""
    if precision not in ("bfloat16", "float16"):
        yield
        return
    dtype, before = getattr(torch, precision), [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    for p, value in before:
        p.data = value.to(dtype)

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

    handle = model.register_forward_pre_hook(cast, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        for p, value in before:
            p.data = value


class Cost(TorchDispatchMode):
    """Counts flops (torch's formulas) and bytes read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        if not func.is_view:
            self.moved += sum(
                t.numel() * t.element_size() for t in pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)
            )
        return out


class Recorder(Walk):
    """Writes down a forward as it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph, self.cost = ModelGraph(), Cost()
        self._names: dict[int, list[int]] = {}  # memory → the values that are in it
        self._parameters = {id(p): n for n, p in model.named_parameters()}
        self._buffers = {id(b): n for n, b in model.named_buffers()}
        self._within: dict[int, None] = {}  # ids, in order, of the tensors that functions within the running event took
        # Tensors and storages are told apart by their address, which the next may get once one has gone: a buffer that
        # the forward puts another in place of, say.
        self._alive: list[Any] = [*model.parameters(), *model.buffers()]

    def entered(
        self, path: Path, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        graph = self.graph
        call = graph.calls[path] = Call(path[-1][0], path, len(graph.events))
        call.leaf = next(module.children(), None) is None
        call.given = (args, kwargs)
        had = {id(t) for t in tensors_of((args, kwargs))}
        of_the_batch = [(t, version(t)) for t in tensors_of((args, kwargs)) if not self.known(t) and not t.is_meta]
        result = self._other_ways(call, module, self.follow(path, forward, args, kwargs))
        call.writes = any(version(t) != before for t, before in of_the_batch)
        tensors = tensors_of(result)
        self._left_behind(call, module, args, kwargs)
        call.stop, call.returned = len(graph.events), _as_given(result, (*args, *kwargs.values()))
        call.outputs = tuple(self.number(t) for t in tensors)
        call.fresh = any(
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
        graph.ways[reads[-1]] = tuple(n for t in tensors_of(result) if (n := self.number(t)) is not None)
        if not any(p.requires_grad for p in module.parameters()) and not any(
            graph.values[n].requires_grad for n in given
        ):
            return result

        def differentiable(t: Tensor) -> Tensor:
            number = self.number(t)
            if number is None or t.requires_grad or not t.is_floating_point():
                return t
            with without_modes():
                made = t.detach().requires_grad_().clone()  # no leaf, which the model could not write to
            self.name_value(made, number)
            graph.values[number] = replace(graph.values[number], requires_grad=True)
            self._alive.append(made)
            return made

        return map_tensors(differentiable, result)

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
        inputs = tuple(n for t in tensors if (n := self.number(t)) is not None)
        flops, moved = self.cost.flops, self.cost.moved
        name = getattr(func, "__name__", str(func))
        loss = mean_target(func, args, kwargs) is not None
        self._within.clear()
        result = _where_it_is(name, args, kwargs, func(*args, **kwargs))
        writing = writes(func, args, kwargs)
        targets = [t for t in (args[:1] if writing else (kwargs.get("out"),)) if isinstance(t, Tensor)]
        given = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        for t in targets:
            self._new(t, place)
            self._written(t)
        for t in given:
            if not isinstance(t, nn.Parameter) and not any(t is x for x in (*targets, *tensors)):
                self._new(t, place)
        graph.outputs[path, index] = result
        took = [*map(id, tensors), *self._within]
        graph.events.append(
            Event(
                path=path,
                index=index,
                function=name,
                inputs=inputs,
                outputs=tuple(map(self.number, given)),
                written=self.number(targets[0]) if targets else None,
                parameters=tuple(dict.fromkeys(self._parameters[i] for i in took if i in self._parameters)),
                buffers=tuple(dict.fromkeys(self._buffers[i] for i in took if i in self._buffers)),
                flops=self.cost.flops - flops,
                moved=self.cost.moved - moved,
                reads=not given and not targets,
                mean_loss=loss,
                line=_line(),
            )
        )
        return result

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function within a custom ``autograd.Function``: its event takes the parameters of the modules that it calls."""
        self._within |= {id(t): None for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        return func(*args, **kwargs)

    def _written(self, t: Tensor) -> None:
        """Other names of the memory that was written have a gradient too now: what a slice was taken of, say."""
        number = self.number(t)
        if number is None or not t.requires_grad:
            return
        for n in self._names.get(self.graph.values[number].storage, ()):
            if not (value := self.graph.values[n]).requires_grad:
                self.graph.values[n] = replace(value, requires_grad=True)

    def _new(self, t: Tensor, place: int) -> None:
        if isinstance(t, nn.Parameter):
            return
        storage = 0
        if t.layout is torch.strided:
            storage = storage_of(t)
            self._alive.append(t.untyped_storage())
        value = Value(
            tuple(t.shape), tuple(t.stride()) if t.layout is torch.strided else (), str(t.dtype).removeprefix("torch."),
            t.element_size(), t.requires_grad, place, storage,
        )  # fmt: skip
        if storage:
            self._names.setdefault(storage, []).append(len(self.graph.values))
        self.name_value(t, len(self.graph.values))
        self.graph.values.append(value)
        self._alive.append(t)


def _where_it_is(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """``result``; of what is moved to the device that it will be on (``self.scale.to(x.device)``, with a parameter on meta) the
    very thing."""
    x = args[0] if args else None
    if name not in ("to", "cpu", "cuda") or not isinstance(x, Tensor) or not isinstance(result, Tensor):
        return result
    same = x.is_meta and result.dtype == x.dtype and not kwargs.get("copy") and "memory_format" not in kwargs
    return x if same else result


def _as_given(result: Any, kept: tuple[Any, ...]) -> Any:
    """``result`` in containers of its own, as the model may go on to write to what a module returned.

    ``kept``: what the call was given stays the very thing.
    """
    ids = {id(x) for x in kept}
    return pytree.tree_map(lambda x: x, result, is_leaf=lambda x: id(x) in ids)


_NOT_THE_MODEL = tuple(os.path.dirname(p.__file__ or "") + os.sep for p in (torch, meshwright))


def _line() -> str:
    """The model's source line that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
