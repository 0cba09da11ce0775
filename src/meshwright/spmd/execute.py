"""``execute``: a decision and tensors → the result. Here alone tensors move.

What a local function gives is settled as on one device (see ``alias``): where it lies, and whose memory it shares. That
follows from the signature of the call as well, so it is found with the first call of a signature, and kept with the decision
(``Prepared``). A later call is the local function on local tensors, and one wrapper for what comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.layout import REPLICATE, Layout, Shard
from meshwright.spmd import redistribute
from meshwright.spmd.alias import (
    Memory,
    Placed,
    Strides,
    alike,
    asked,
    contiguous,
    dense,
    laid,
    noted,
    order,
    share,
)
from meshwright.spmd.decide.registry import ELEMENTWISE
from meshwright.spmd.decision import Decision, Need, Use
from meshwright.spmd.signature import replaced
from meshwright.spmd.tensor import GlobalTensor, Spec, lies, spec, spec_of, wrapping
from meshwright.spmd.torch_functions import BY_DEVICE, aliases

if TYPE_CHECKING:
    from meshwright.spmd.dispatcher import Dispatcher

Ready = Callable[["Dispatcher", Sequence[Tensor]], Any]
"""A call of a signature that is known: its tensors → its result."""


def brought(dispatcher: Dispatcher, t: Tensor, need: Need | Shard) -> Any:
    """A tensor as an operand needs it: moved, if it is not so already."""
    if need is Need.VARYING:
        return t if type(t) is Tensor and not t.requires_grad else dispatcher.varying(t)
    if isinstance(need, Shard):
        return dispatcher.cut(t, need)
    if need is Need.LOCAL:
        return t._mw_local if isinstance(t, GlobalTensor) else t
    if need is Need.REPLICATE:
        return dispatcher.whole(t)
    if need is Need.PLAIN:
        return dispatcher.plain(t)
    if need is Need.SUMMAND:
        return redistribute.keep_first(dispatcher.whole(t), dispatcher.axis)
    return t  # as it is given


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a global tensor that comes out of every call of a signature.

    Attributes:
        source: the tensor of the call whose memory it shares on one device.
        apart: whether it does not share that memory here: then neither is to be written.
        cloned: whether the local result shares memory that the global tensor does not share on one device.
        strides: how the local result is to lie, if it comes otherwise.
    """

    known: Spec
    source: int | None = None
    apart: bool = False
    cloned: bool = False
    strides: Strides | None = None

    def of(self, dispatcher: Dispatcher, local: Tensor, tensors: Sequence[Tensor]) -> GlobalTensor:
        """The global tensor of a local result."""
        known = self.known
        if self.cloned:
            local = local.clone()
        if self.strides is not None:
            local = laid(local, self.strides)
        if local.dtype is not known.dtype:  # by something that is no part of a signature: torch's default type, say
            known = spec(
                known.layout, known.shape, local.dtype, known.device, known.strides, known.offset, known.lies, False
            )
        made = wrapping(known)(local, dispatcher)
        if self.source is not None:
            source = tensors[self.source]
            assert type(source) is GlobalTensor
            memory = source._mw_memory
            if memory is None:
                memory = source._mw_memory = Memory()
            made._mw_memory = memory
            if source._mw_silent:
                made._mw_remember(silent=True)
            if self.apart or source._mw_apart:
                made._mw_remember(apart=True)
                source._mw_remember(apart=True)
        return made


class Prepared:
    """A decision, ready to be executed for every call of its signature."""

    __slots__ = ("args", "decision", "first", "itself", "rest", "result", "results", "run", "slots", "views")

    def __init__(self, decision: Decision) -> None:
        self.decision, self.run = decision, decision.run
        self.args = list(decision.args)
        # Most operands are arguments themselves; some stand in lists, or have names.
        self.slots = [
            (at, x.index, None if x.need is Need.LOCAL else x.need) for at, x in enumerate(self.args) if type(x) is Use
        ]
        # How many arguments at the beginning are what is held of the first tensors, if the rest are constants; or None.
        self.first: int | None = None
        self.rest = tuple(self.args[len(self.slots) :])
        self.itself: int | None = decision.itself  # the tensor of the call that comes out
        self.result: Result | None = None
        self.results: tuple[Result, ...] | None = None
        self.views: frozenset[int] = frozenset()  # which tensors of the call are global tensors

    def __call__(self, dispatcher: Dispatcher, tensors: Sequence[Tensor]) -> Any:
        """The result of a call that is settled."""
        out = self._local(dispatcher, tensors)
        if self.result is not None:
            return self.result.of(dispatcher, out, tensors)
        if self.itself is not None:
            t = tensors[self.itself]
            if self.decision.writes and isinstance(t, GlobalTensor) and t._mw_memory is not None:
                t._mw_memory.written += 1
            return t
        if self.results is not None:
            return _like(out, [r.of(dispatcher, t, tensors) for r, t in zip(self.results, out, strict=True)])
        return out

    def ready(self) -> Ready:
        """The same, of which only that is left which calls of this signature need: the local function, and a wrapper."""
        result, rest, run = self.result, self.rest, self.run
        if result is None or result.cloned or result.strides is not None or result.apart:
            return self
        dtype, wrapped = result.known.dtype, wrapping(result.known)
        if result.source is not None:
            return self._sharing(result, result.source) if self.first == 1 else self
        if self.first == 1:

            def of_one(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                out = run(tensors[0]._mw_local, *rest)
                return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

            return of_one
        if self.first == 2 and not rest:

            def of_both(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                a, b = tensors
                out = run(a._mw_local, b._mw_local)  # without constants: to unpack none costs a tenth of a microsecond
                return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

            return of_both
        if self.first == 2:

            def of_two(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                out = run(tensors[0]._mw_local, tensors[1]._mw_local, *rest)
                return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

            return of_two
        if self.first is not None:
            return self._from_slots(result)
        local = self._local

        def of_several(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            out = local(dispatcher, tensors)
            return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

        return of_several

    def _from_slots(self, result: Result) -> Ready:
        """The same of operands that are all arguments themselves."""
        run, base, varying = self.run, self.args, Need.VARYING
        dtype, wrapped = result.known.dtype, wrapping(result.known)
        slots = [(at, index, index in self.views, need) for at, index, need in self.slots]
        if len(slots) == 2 and all(at == index for at, index, *_ in slots):
            return self._from_pair(result, *slots[0][2:], *slots[1][2:])

        def of_slots(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            args = base.copy()
            for at, index, is_view, need in slots:
                t = tensors[index]
                if need is None:
                    args[at] = t._mw_local if is_view else t
                elif need is varying and type(t) is Tensor and not t.requires_grad:
                    args[at] = t  # the batch: as `brought` has it, of which this is what is asked most
                else:
                    args[at] = brought(dispatcher, t, need)
            out = run(*args)
            return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

        return of_slots

    def _from_pair(self, result: Result, view_a: bool, need_a: Any, view_b: bool, need_b: Any) -> Ready:
        """The same of two operands, the first two arguments: as of a linear layer without a bias."""
        run, rest, varying = self.run, self.rest, Need.VARYING
        dtype, wrapped = result.known.dtype, wrapping(result.known)

        if need_a is varying and need_b is None and view_b and not rest:

            def of_layer(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                a, b = tensors
                if a.requires_grad or type(a) is not Tensor:
                    a = brought(dispatcher, a, varying)
                out = run(a, b._mw_local)
                return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

            return of_layer

        def of_pair(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            a, b = tensors
            if need_a is None:
                a = a._mw_local if view_a else a
            elif need_a is not varying or a.requires_grad or type(a) is not Tensor:
                a = brought(dispatcher, a, need_a)
            if need_b is None:
                b = b._mw_local if view_b else b
            elif need_b is not varying or b.requires_grad or type(b) is not Tensor:
                b = brought(dispatcher, b, need_b)
            out = run(a, b, *rest)
            return wrapped(out, dispatcher) if out.dtype is dtype else result.of(dispatcher, out, tensors)

        return of_pair

    def _sharing(self, result: Result, source: int) -> Ready:
        """The same of a function that gives a view of its one tensor."""
        run, rest, dtype, wrapped = self.run, self.rest, result.known.dtype, wrapping(result.known)

        def view_of_one(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            base = tensors[source]
            out = run(base._mw_local, *rest)
            if out.dtype is not dtype or base._mw_spec is None:
                return result.of(dispatcher, out, tensors)
            memory = base._mw_memory
            if memory is None:
                memory = base._mw_memory = Memory()
            return wrapped(out, dispatcher, memory)

        return view_of_one

    def _local(self, dispatcher: Dispatcher, tensors: Sequence[Tensor]) -> Any:
        """What the local function gives."""
        args = self.args.copy()
        for at, index, need in self.slots:
            t = tensors[index]
            if need is None:
                args[at] = t._mw_local if type(t) is GlobalTensor else t
            else:
                args[at] = brought(dispatcher, t, need)
        if self.first is not None:  # no more than that
            return self.run(*args)
        args, kwargs = replaced(
            (args, self.decision.kwargs),
            lambda x: brought(dispatcher, tensors[x.index], x.need) if type(x) is Use else x,
        )
        return self.run(dispatcher.axis, *args, **kwargs) if self.decision.axis else self.run(*args, **kwargs)

    def _simplify(self, tensors: Sequence[Tensor]) -> None:
        """Leaves out what there is not to do for tensors of these Specs."""
        self.slots = [(at, i, None if _is_so(tensors[i], need) else need) for at, i, need in self.slots]
        kwargs = self.decision.kwargs
        if self.decision.axis or _has_uses([x for x in self.args if type(x) is not Use]) or _has_uses(kwargs):
            return
        if kwargs:
            self.run = functools.partial(self.run, **kwargs)
        count = len(self.slots)
        views = self.slots == [(i, i, None) for i in range(count)] and all(
            type(tensors[i]) is GlobalTensor for i in range(count)
        )
        self.first = count if views and count in (1, 2) else 0
        self.views = frozenset(i for i, t in enumerate(tensors) if type(t) is GlobalTensor)

    def settle(self, dispatcher: Dispatcher, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """The result of the first call; what the later ones have in common with it is known then."""
        out = self(dispatcher, tensors)
        self._simplify(tensors)
        pieces: Sequence[Any] = out if isinstance(out, (tuple, list)) else (out,)
        layouts = self.decision.out if isinstance(self.decision.out, tuple) else (self.decision.out,) * len(pieces)
        if (
            self.itself is not None
            or all(layout == REPLICATE for layout in layouts)
            or not isinstance(pieces[0], Tensor)
        ):
            return out
        if pieces is not out:
            held = (i for i, t in enumerate(tensors) if type(t) is GlobalTensor and t._mw_local is out)
            self.itself = next((i for i in held if tensors[i]._mw_layout == layouts[0]), None)  # type: ignore[attr-defined]
            if self.itself is not None:
                return tensors[self.itself]
        usual = all(spec_of(t).usual for t in tensors)
        places = _places(func, args, kwargs, pieces, usual)
        if pieces is not out and places[0] is not None and places[0].itself:
            source = args[places[0].source]
            if type(source) is GlobalTensor:
                self.itself = _index(tensors, source)
                return source
        results = [_result(func, args, tensors, *piece, usual) for piece in zip(pieces, layouts, places, strict=True)]
        if pieces is out:
            self.results = tuple(results)
            return _like(out, [r.of(dispatcher, t, tensors) for r, t in zip(results, pieces, strict=True)])
        self.result = result = results[0]
        return result.of(dispatcher, out, tensors)


def _is_so(t: Tensor, need: Need | Shard | None) -> bool:
    """Whether what is held of a tensor is what an operand needs."""
    if type(t) is GlobalTensor:
        return need is None or need == t._mw_layout
    return need in (None, Need.REPLICATE, Need.PLAIN)


def _like(out: Any, pieces: list[Any]) -> Any:
    """Results in the structure that a function gave them in: a tuple, a list, or one of torch's named tuples."""
    return type(out)(pieces)


def _has_uses(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_uses, value))
    if isinstance(value, dict):
        return any(map(_has_uses, value.values()))
    return type(value) is Use


def _index(tensors: Sequence[Tensor], t: Tensor) -> int:
    return next(i for i, x in enumerate(tensors) if x is t)


def _places(func: Any, args: Any, kwargs: Any, pieces: Sequence[Tensor], usual: bool) -> Sequence[Placed | None]:
    """Where results lie on one device; None for fresh memory, in the order of dims that the local result has.

    ``usual``: whether all operands are contiguous. If they are, the local result says all, but for a memory format, of which
    a local tensor with a dim of size 1 says too little.
    """
    aliasing, places = aliases(func), None
    if aliasing or not usual or "memory_format" in kwargs:
        places = asked(func, args, kwargs, lies) if aliasing or func not in BY_DEVICE else None
    return places if places is not None and len(places) == len(pieces) else (None,) * len(pieces)


def _result(
    func: Any, args: Any, tensors: Sequence[Tensor], local: Tensor, layout: Any, place: Placed | None, usual: bool
) -> Result:
    """What is known of a global tensor that comes out, by the first one."""
    size = _whole_shape(layout, local)
    source = None if place is None or place.source is None else args[place.source]
    if type(source) is GlobalTensor:
        assert place is not None
        apart = local.numel() > 0 and not share(local, source._mw_local)
        known = _known(layout, size, local, place.laid, place.offset, local.stride())
        return Result(known, source=_index(tensors, source), apart=apart)
    cloned = aliases(func) and any(isinstance(x, GlobalTensor) and share(local, x._mw_local) for x in args)
    if cloned:
        local = local.clone()
    if place is None and usual and not aliases(func) and _as_usual(func, local):
        return Result(_known(layout, size, local, None, 0, local.stride()), cloned=cloned)
    return replace(fresh(layout, local, None if place is None else place.strides), cloned=cloned)


def fresh(layout: Layout, local: Tensor, strides: Strides | None) -> Result:
    """A local tensor in memory of its own, which lies as the whole one lies on one device; None: in the order of dims that
    the local tensor has."""
    size = _whole_shape(layout, local)
    if strides is None:
        dims = order(tuple(local.shape), local.stride())
        strides = contiguous(size) if dims is None else dense(size, dims)
    wanted = dense(tuple(local.shape), order(size, strides) or tuple(range(len(size))))
    fits = alike(local.shape, local.stride(), wanted)
    known = _known(layout, size, local, noted(size, strides), 0, local.stride() if fits else wanted)
    return Result(known, strides=None if fits else wanted)


def _whole_shape(layout: Layout, local: Tensor) -> tuple[int, ...]:
    shape = list(local.shape)
    if isinstance(layout, Shard):
        shape[layout.dim] = layout.size
    return tuple(shape)


def _known(layout: Any, shape: Any, local: Tensor, strides: Strides | None, offset: int, here: Strides) -> Spec:
    if not isinstance(layout, Shard):
        strides, offset = None, 0
    return spec(layout, torch.Size(shape), local.dtype, local.device, strides, offset, here, False)


def _as_usual(func: Any, local: Tensor) -> bool:
    """Whether the result of contiguous operands is contiguous, by the local result.

    The strides of dims of size 1 tell what is_contiguous does not: in which order a kernel allocated.
    """
    return (func in ELEMENTWISE and local.is_contiguous()) or local.stride() == contiguous(tuple(local.shape))
