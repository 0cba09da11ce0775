"""The moves between layouts, each with its conjugate as backward.

    forward                                              backward                           function
    a whole tensor enters sharded work: nothing moves    all-reduce of its gradient         copy_in
    Partial → Replicate: all-reduce                      nothing moves                      all_reduce
    Partial → Shard: reduce-scatter                      all-gather                         reduce_scatter
    Shard → Replicate, used whole: all-gather            keep my slice                      all_gather
    Shard → Replicate, used in sharded work: all-gather  reduce-scatter                     all_gather_in
    Replicate → Shard: keep my slice                     all-gather                         keep_slice
    Shard → Shard of another dim: all-to-all             all-to-all                         all_to_all
    Replicate → Partial: the first rank keeps it         nothing moves                      keep_first

"Whole, with a whole gradient" is what the rest of torch calls a tensor; "used in sharded work" means that every rank uses
it for its part only, so that its gradient is a sum over ranks. This is the type theory of local SPMD code (invariant,
varying, sharded, partial); Megatron-LM's f and g are ``copy_in`` and ``all_reduce`` (arXiv 1909.08053, section 3).
All take and give local tensors. Each backward is another of these moves, so that they can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.layout import Shard
from meshwright.spmd.comm import Axis

# The arguments of forward and backward are fixed by torch; the contexts are untyped there.


class _Move(Function):
    """A move. Where one device gives no gradient (a function of the model's own may give none) every rank gives none: none is
    not made zeros, which an optimizer would decay weights by."""

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        return (None if g is None else ctx.conjugate(g), *ctx.nothing)


def _conjugate(ctx: Any, move: Callable[[Tensor], Tensor], *, others: int) -> None:
    """What the backward does; ``others``: how many arguments get no gradient."""
    ctx.set_materialize_grads(False)
    ctx.conjugate, ctx.nothing = move, (None,) * others


class _Enter(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, wide: bool) -> Tensor:
        def summed(g: Tensor) -> Tensor:
            if wide and g.dtype in (torch.bfloat16, torch.float16):
                return all_reduce(g.float(), axis).to(g.dtype)
            return all_reduce(g, axis)

        _conjugate(ctx, summed, others=2)
        return x.detach()  # not a view of x, which x, that remembers it, would keep alive for ever; versions are shared


class _Reduce(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        _conjugate(ctx, lambda g: _Enter.apply(g, axis, False), others=1)
        return axis.all_reduce(x)


class _ReduceScatter(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        _conjugate(ctx, lambda g: all_gather_in(g, axis, layout), others=2)
        return axis.reduce_scatter(x, layout)


class _Gather(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        _conjugate(ctx, lambda g: _Take.apply(g, axis, layout), others=2)
        return axis.all_gather(x, layout)


class _GatherEnter(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        _conjugate(ctx, lambda g: reduce_scatter(g, axis, layout), others=2)
        return axis.all_gather(x, layout)


class _Take(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        _conjugate(ctx, lambda g: all_gather(g, axis, layout), others=2)
        # A copy: a view made inside a Function could not be written to in place by the model.
        return layout.take(x, axis.rank).clone(memory_format=torch.contiguous_format)


class _Exchange(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, source: Shard, target: Shard) -> Tensor:
        _conjugate(ctx, lambda g: all_to_all(g, axis, target, source), others=3)
        return axis.all_to_all(x, source, target)


class _Hold(_Move):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        _conjugate(ctx, lambda g: keep_first_backward(g, axis), others=1)
        return x.clone() if axis.rank == 0 else torch.zeros_like(x)


class _Release(_Move):
    """The gradient of ``_Hold``: nothing moves, and its own gradient is held again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, axis: Axis) -> Tensor:
        _conjugate(ctx, lambda h: keep_first(h, axis), others=1)
        return g.view_as(g)


def copy_in(x: Tensor, axis: Axis, *, wide: bool = False) -> Tensor:
    """A whole tensor, as used by sharded work: its gradient is summed over the axis.

    ``wide``: sum half-precision gradients in float32 (parameters: FSDP's ``reduce_dtype`` does not reach this sum).
    """
    return _Enter.apply(x, axis, wide) if _differentiable(x) else x


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Partial → Replicate."""
    return _Reduce.apply(x, axis)


def reduce_scatter(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Partial → Shard."""
    return _ReduceScatter.apply(x, axis, layout)


def all_gather(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Shard → Replicate, to be used whole."""
    return _Gather.apply(x, axis, layout)


def all_gather_in(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Shard → Replicate, to be used by sharded work."""
    return _GatherEnter.apply(x, axis, layout)


def keep_slice(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Replicate → Shard."""
    return _Take.apply(x, axis, layout) if _differentiable(x) else layout.take(x, axis.rank)


def all_to_all(x: Tensor, axis: Axis, source: Shard, target: Shard) -> Tensor:
    """Shard → Shard of another dim."""
    return _Exchange.apply(x, axis, source, target)


def keep_first(x: Tensor, axis: Axis) -> Tensor:
    """Replicate → Partial."""
    return _Hold.apply(x, axis)


def keep_first_backward(x: Tensor, axis: Axis) -> Tensor:
    """The gradient of a summand, which is the same on every rank, as a whole tensor: nothing moves."""
    return _Release.apply(x, axis)


def _differentiable(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
