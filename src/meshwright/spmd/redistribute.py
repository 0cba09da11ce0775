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

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.layout import Shard
from meshwright.spmd.comm import Axis

# The arguments of forward and backward are fixed by torch; the contexts are untyped there.


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, wide: bool) -> Tensor:
        ctx.axis, ctx.wide = axis, wide
        return x.detach()  # not a view of x, which x, that remembers it, would keep alive for ever; versions are shared

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        if ctx.wide and g.dtype in (torch.bfloat16, torch.float16):
            return _Reduce.apply(g.float(), ctx.axis).to(g.dtype), None, None
        return _Reduce.apply(g, ctx.axis), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Enter.apply(g, ctx.axis, False), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return axis.reduce_scatter(x, layout)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _GatherEnter.apply(g, ctx.axis, ctx.layout), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return axis.all_gather(x, layout)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Take.apply(g, ctx.axis, ctx.layout), None, None


class _GatherEnter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return axis.all_gather(x, layout)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _ReduceScatter.apply(g, ctx.axis, ctx.layout), None, None


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        # A copy: a view made inside a Function could not be written to in place by the model.
        return layout.take(x, axis.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(g, ctx.axis, ctx.layout), None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, source: Shard, target: Shard) -> Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        return axis.all_to_all(x, source, target)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(g, ctx.axis, ctx.target, ctx.source), None, None, None


class _Hold(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.clone() if axis.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _Release.apply(g, ctx.axis), None


class _Release(Function):
    """The gradient of ``_Hold``: nothing moves, and its own gradient is held again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return g.view_as(g)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:
        return _Hold.apply(h, ctx.axis), None


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
