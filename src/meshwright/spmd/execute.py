"""Executes decisions: a decision and tensors → the result. Only here operands are redistributed.

The result lies in memory as on one device, and shares the memory that it shares there (see ``alias``). This too follows from
the signature of the call. So it is determined with the first call of a signature, and kept with the decision
(``PreparedDecision``). A later call is the local function on local tensors, and one wrapper for the result.
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
    ResultGeometry,
    Strides,
    contiguous,
    dense,
    dim_order,
    noted_strides,
    result_geometries,
    same_strides,
    share_storage,
    with_strides,
)
from meshwright.spmd.decide.registry import ELEMENTWISE
from meshwright.spmd.decision import Decision, Need, Use
from meshwright.spmd.signature import replaced
from meshwright.spmd.tensor import GlobalTensor, Spec, geometry_of, spec, spec_of, wrapping
from meshwright.spmd.torch_functions import BY_DEVICE, aliases

if TYPE_CHECKING:
    from meshwright.spmd.dispatcher import Dispatcher

Ready = Callable[["Dispatcher", Sequence[Tensor]], Any]
"""Executes a call whose signature is known: (dispatcher, tensors of the call) → result."""


def redistributed_for(dispatcher: Dispatcher, t: Tensor, need: Need | Shard) -> Any:
    """The tensor that an operand needs: redistributed, if its layout is another."""
    if need is Need.VARYING:
        return t if type(t) is Tensor and not t.requires_grad else dispatcher.varying(t)
    if isinstance(need, Shard):
        return dispatcher.shard(t, need)
    if need is Need.LOCAL:
        return t._mw_local if isinstance(t, GlobalTensor) else t
    if need is Need.REPLICATE:
        return dispatcher.full_tensor(t)
    if need is Need.PLAIN:
        return dispatcher.plain(t)
    if need is Need.SUMMAND:
        return redistribute.keep_first(dispatcher.full_tensor(t), dispatcher.axis)
    return t  # Need.ORIGINAL


@dataclass(frozen=True, slots=True)
class Result:
    """What every call of a signature returns: how to make the global tensor of the local result.

    Attributes:
        known: the Spec of the global tensor.
        source: the index of the tensor of the call whose memory it shares on one device; None: none.
        apart: whether the local tensors do not share that memory: then writes to either are refused.
        cloned: whether to clone the local result, because it shares memory that the result does not share on one device.
        strides: the strides that the local result must get; None if it has them.
        by_kernel: whether another call of the signature may take another kernel, whose result has other strides
            (attention, if the mask needs a gradient).
    """

    known: Spec
    source: int | None = None
    apart: bool = False
    cloned: bool = False
    strides: Strides | None = None
    by_kernel: bool = False

    def global_tensor(self, dispatcher: Dispatcher, local: Tensor, tensors: Sequence[Tensor]) -> GlobalTensor:
        """The global tensor of a local result. ``tensors``: those of the call."""
        known = self.known
        if self.by_kernel and local.stride() != known.local_strides:
            return in_new_memory(known.layout, local, None).global_tensor(dispatcher, local, tensors)
        if self.cloned:
            local = local.clone()
        if self.strides is not None:
            local = with_strides(local, self.strides)
        if local.dtype is not known.dtype:  # by a setting that is no part of a signature: torch's default dtype, say
            known = spec(
                known.layout,
                known.shape,
                local.dtype,
                known.device,
                known.strides,
                known.offset,
                known.local_strides,
                False,
            )
        result = wrapping(known)(local, dispatcher)
        if self.source is not None:
            source = tensors[self.source]
            assert type(source) is GlobalTensor
            memory = source._mw_memory
            if memory is None:
                memory = source._mw_memory = Memory()
            result._mw_memory = memory
            if source._mw_silent:
                result._mw_remember(silent=True)
            if self.apart or source._mw_apart:
                result._mw_remember(apart=True)
                source._mw_remember(apart=True)
        return result


class PreparedDecision:
    """A decision, prepared to execute every call of its signature."""

    __slots__ = ("args", "decision", "first", "global_indices", "itself", "rest", "result", "results", "run", "slots")

    def __init__(self, decision: Decision) -> None:
        self.decision, self.run = decision, decision.run
        self.args = list(decision.args)
        # (position, operand, need) of the operands that are positional arguments. Others are in lists, or keywords.
        self.slots = [
            (at, x.index, None if x.need is Need.LOCAL else x.need) for at, x in enumerate(self.args) if type(x) is Use
        ]
        # None: operands also stand in lists or keywords. 1 or 2: the first argument, or the first two, are the local tensors
        # of the first global tensors of the call, and the rest are constants. 0: anything else.
        self.first: int | None = None
        self.rest = tuple(self.args[len(self.slots) :])
        self.itself: int | None = decision.itself  # the tensor of the call that is returned
        self.result: Result | None = None
        self.results: tuple[Result, ...] | None = None
        self.global_indices: frozenset[int] = frozenset()  # which tensors of the call are global tensors

    def __call__(self, dispatcher: Dispatcher, tensors: Sequence[Tensor]) -> Any:
        """The result of a call, after ``run_first``."""
        out = self._local(dispatcher, tensors)
        if self.result is not None:
            return self.result.global_tensor(dispatcher, out, tensors)
        if self.itself is not None:
            t = tensors[self.itself]
            if self.decision.writes and isinstance(t, GlobalTensor) and t._mw_memory is not None:
                t._mw_memory.written += 1
            return t
        if self.results is not None:
            return _in_structure(
                out, [r.global_tensor(dispatcher, t, tensors) for r, t in zip(self.results, out, strict=True)]
            )
        return out

    def specialized(self) -> Ready:
        """A function for the calls of this signature, with only the steps that they need; most need the local function and one
        wrapper."""
        result, rest, run = self.result, self.rest, self.run
        if result is None or result.cloned or result.strides is not None or result.apart or result.by_kernel:
            return self
        dtype, wrapped = result.known.dtype, wrapping(result.known)
        if result.source is not None:
            return self._sharing(result, result.source) if self.first == 1 else self
        if self.first == 1:

            def of_one(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                out = run(tensors[0]._mw_local, *rest)
                return (
                    wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)
                )

            return of_one
        if self.first == 2 and not rest:

            def of_both(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                a, b = tensors
                out = run(a._mw_local, b._mw_local)  # without ``*rest``, which would take a tenth of a microsecond
                return (
                    wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)
                )

            return of_both
        if self.first == 2:

            def of_two(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                out = run(tensors[0]._mw_local, tensors[1]._mw_local, *rest)
                return (
                    wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)
                )

            return of_two
        if self.first is not None:
            return self._from_slots(result)
        local = self._local

        def of_several(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            out = local(dispatcher, tensors)
            return wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)

        return of_several

    def _from_slots(self, result: Result) -> Ready:
        """``specialized`` for a call whose operands are all positional arguments."""
        run, base, varying = self.run, self.args, Need.VARYING
        dtype, wrapped = result.known.dtype, wrapping(result.known)
        slots = [(at, index, index in self.global_indices, need) for at, index, need in self.slots]
        if len(slots) == 2 and all(at == index for at, index, *_ in slots):
            return self._from_pair(result, *slots[0][2:], *slots[1][2:])

        def of_slots(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            args = base.copy()
            for at, index, is_global, need in slots:
                t = tensors[index]
                if need is None:
                    args[at] = t._mw_local if is_global else t
                elif need is varying and type(t) is Tensor and not t.requires_grad:
                    args[at] = t  # the most frequent case of ``redistributed_for``, inlined: a tensor of the batch
                else:
                    args[at] = redistributed_for(dispatcher, t, need)
            out = run(*args)
            return wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)

        return of_slots

    def _from_pair(self, result: Result, a_is_global: bool, need_a: Any, b_is_global: bool, need_b: Any) -> Ready:
        """``specialized`` for a call whose operands are its first two arguments: a linear layer without bias, say."""
        run, rest, varying = self.run, self.rest, Need.VARYING
        dtype, wrapped = result.known.dtype, wrapping(result.known)

        if need_a is varying and need_b is None and b_is_global and not rest:

            def of_layer(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
                a, b = tensors
                if a.requires_grad or type(a) is not Tensor:
                    a = redistributed_for(dispatcher, a, varying)
                out = run(a, b._mw_local)
                return (
                    wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)
                )

            return of_layer

        def of_pair(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            a, b = tensors
            if need_a is None:
                a = a._mw_local if a_is_global else a
            elif need_a is not varying or a.requires_grad or type(a) is not Tensor:
                a = redistributed_for(dispatcher, a, need_a)
            if need_b is None:
                b = b._mw_local if b_is_global else b
            elif need_b is not varying or b.requires_grad or type(b) is not Tensor:
                b = redistributed_for(dispatcher, b, need_b)
            out = run(a, b, *rest)
            return wrapped(out, dispatcher) if out.dtype is dtype else result.global_tensor(dispatcher, out, tensors)

        return of_pair

    def _sharing(self, result: Result, source: int) -> Ready:
        """``specialized`` for a function that returns a view of its only tensor."""
        run, rest, dtype, wrapped = self.run, self.rest, result.known.dtype, wrapping(result.known)

        def view_of_one(dispatcher: Dispatcher, tensors: Sequence[Any]) -> Any:
            base = tensors[source]
            out = run(base._mw_local, *rest)
            if out.dtype is not dtype or base._mw_spec is None:
                return result.global_tensor(dispatcher, out, tensors)
            memory = base._mw_memory
            if memory is None:
                memory = base._mw_memory = Memory()
            return wrapped(out, dispatcher, memory)

        return view_of_one

    def _local(self, dispatcher: Dispatcher, tensors: Sequence[Tensor]) -> Any:
        """The result of the local function."""
        args = self.args.copy()
        for at, index, need in self.slots:
            t = tensors[index]
            if need is None:
                args[at] = t._mw_local if type(t) is GlobalTensor else t
            else:
                args[at] = redistributed_for(dispatcher, t, need)
        if self.first is not None:  # there are no other operands
            return self.run(*args)
        args, kwargs = replaced(
            (args, self.decision.kwargs),
            lambda x: redistributed_for(dispatcher, tensors[x.index], x.need) if type(x) is Use else x,
        )
        return self.run(dispatcher.axis, *args, **kwargs) if self.decision.axis else self.run(*args, **kwargs)

    def _simplify(self, tensors: Sequence[Tensor]) -> None:
        """Drops steps that tensors with these Specs do not need."""
        self.slots = [(at, i, None if _is_met(tensors[i], need) else need) for at, i, need in self.slots]
        kwargs = self.decision.kwargs
        if self.decision.axis or _has_uses([x for x in self.args if type(x) is not Use]) or _has_uses(kwargs):
            return
        if kwargs:
            self.run = functools.partial(self.run, **kwargs)
        count = len(self.slots)
        only_local = self.slots == [(i, i, None) for i in range(count)]
        all_global = all(type(tensors[i]) is GlobalTensor for i in range(count))
        self.first = count if only_local and all_global and count in (1, 2) else 0
        self.global_indices = frozenset(i for i, t in enumerate(tensors) if type(t) is GlobalTensor)

    def run_first(self, dispatcher: Dispatcher, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """The result of the first call. It determines ``itself``, ``result`` or ``results`` for all later calls."""
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
            candidates = (i for i, t in enumerate(tensors) if type(t) is GlobalTensor and t._mw_local is out)
            self.itself = next((i for i in candidates if tensors[i]._mw_layout == layouts[0]), None)  # type: ignore[attr-defined]
            if self.itself is not None:
                return tensors[self.itself]
        all_contiguous = all(spec_of(t).is_contiguous for t in tensors)
        geometries = _geometries(func, args, kwargs, pieces, all_contiguous)
        if pieces is not out and geometries[0] is not None and geometries[0].itself:
            source = args[geometries[0].source]
            if type(source) is GlobalTensor:
                self.itself = _index(tensors, source)
                return source
        results = [
            _result(func, args, tensors, *piece, all_contiguous)
            for piece in zip(pieces, layouts, geometries, strict=True)
        ]
        if pieces is out:
            self.results = tuple(results)
            return _in_structure(
                out, [r.global_tensor(dispatcher, t, tensors) for r, t in zip(results, pieces, strict=True)]
            )
        self.result = result = results[0]
        return result.global_tensor(dispatcher, out, tensors)


def _is_met(t: Tensor, need: Need | Shard | None) -> bool:
    """Whether the local tensor is what an operand needs."""
    if type(t) is GlobalTensor:
        return need is None or need == t._mw_layout
    return need in (None, Need.REPLICATE, Need.PLAIN)


def _in_structure(out: Any, pieces: list[Any]) -> Any:
    """The results in the structure of ``out``: a tuple, a list, or one of torch's named tuples."""
    return type(out)(pieces)


def _has_uses(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_uses, value))
    if isinstance(value, dict):
        return any(map(_has_uses, value.values()))
    return type(value) is Use


def _index(tensors: Sequence[Tensor], t: Tensor) -> int:
    return next(i for i, x in enumerate(tensors) if x is t)


def _geometries(
    func: Any, args: Any, kwargs: Any, pieces: Sequence[Tensor], all_contiguous: bool
) -> Sequence[ResultGeometry | None]:
    """The geometry of each result on one device; None: new memory, with the dim order of the local result.

    ``all_contiguous``: whether all operands are contiguous. Then the local result shows the geometry; except with a
    memory format, which a local tensor with a dim of size 1 does not show.
    """
    aliasing, geometries = aliases(func), None
    if aliasing or not all_contiguous or "memory_format" in kwargs:
        geometries = result_geometries(func, args, kwargs, geometry_of) if aliasing or func not in BY_DEVICE else None
    return geometries if geometries is not None and len(geometries) == len(pieces) else (None,) * len(pieces)


def _result(
    func: Any,
    args: Any,
    tensors: Sequence[Tensor],
    local: Tensor,
    layout: Any,
    geometry: ResultGeometry | None,
    all_contiguous: bool,
) -> Result:
    """How to make the global tensor, from the local result of the first call."""
    shape = _whole_shape(layout, local)
    source = None if geometry is None or geometry.source is None else args[geometry.source]
    if type(source) is GlobalTensor:
        assert geometry is not None
        apart = local.numel() > 0 and not share_storage(local, source._mw_local)
        known = _spec_of_result(layout, shape, local, geometry.noted_strides, geometry.offset, local.stride())
        return Result(known, source=_index(tensors, source), apart=apart)
    cloned = aliases(func) and any(isinstance(x, GlobalTensor) and share_storage(local, x._mw_local) for x in args)
    if cloned:
        local = local.clone()
    if func in BY_DEVICE:
        return replace(in_new_memory(layout, local, None), by_kernel=True)
    if geometry is None and all_contiguous and not aliases(func) and _is_contiguous_result(func, local):
        return Result(_spec_of_result(layout, shape, local, None, 0, local.stride()), cloned=cloned)
    return replace(in_new_memory(layout, local, None if geometry is None else geometry.strides), cloned=cloned)


def in_new_memory(layout: Layout, local: Tensor, strides: Strides | None) -> Result:
    """The Result for a local tensor in new memory.

    ``strides``: those of the full tensor on one device; None: dense, with the dim order of the local tensor.
    """
    shape = _whole_shape(layout, local)
    if strides is None:
        dims = dim_order(tuple(local.shape), local.stride())
        strides = contiguous(shape) if dims is None else dense(shape, dims)
    wanted = dense(tuple(local.shape), dim_order(shape, strides) or tuple(range(len(shape))))
    fits = same_strides(local.shape, local.stride(), wanted)
    known = _spec_of_result(layout, shape, local, noted_strides(shape, strides), 0, local.stride() if fits else wanted)
    return Result(known, strides=None if fits else wanted)


def _whole_shape(layout: Layout, local: Tensor) -> tuple[int, ...]:
    shape = list(local.shape)
    if isinstance(layout, Shard):
        shape[layout.dim] = layout.size
    return tuple(shape)


def _spec_of_result(
    layout: Any, shape: Any, local: Tensor, strides: Strides | None, offset: int, local_strides: Strides
) -> Spec:
    if not isinstance(layout, Shard):
        strides, offset = None, 0
    return spec(layout, torch.Size(shape), local.dtype, local.device, strides, offset, local_strides, False)


def _is_contiguous_result(func: Any, local: Tensor) -> bool:
    """Whether the result of contiguous operands is contiguous on one device, judged by the local result.

    The strides of dims of size 1 show the dim order in which a kernel allocated; ``is_contiguous`` ignores them.
    """
    return (func in ELEMENTWISE and local.is_contiguous()) or local.stride() == contiguous(tuple(local.shape))
