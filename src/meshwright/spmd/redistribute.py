"""The moves between layouts, each with its conjugate as backward.

    forward                                              backward                           function
    a full tensor enters sharded work: nothing moves     all-reduce of its gradient         copy_in
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
from meshwright.private import without_modes
from meshwright.spmd.comm import Axis, Finish, finished

# The arguments of forward and backward are fixed by torch; the contexts are untyped there.


class Move(Function):
    """A move: ``compute`` does it, without a graph; ``conjugate`` says which move its backward is, with which options.

    If one device gives no gradient (a function of the model's own may give none), every rank gives none: none is not made
    zeros, which an optimizer would decay weights by.

    Attributes:
        still: whether what it gives is, on every rank, what it is given.
    """

    still = False

    @staticmethod
    def compute(x: Tensor, axis: Axis, *options: Any) -> Tensor:
        raise NotImplementedError

    @classmethod
    def begin(cls, x: Tensor, axis: Axis, *options: Any) -> Finish:
        """Begins the move of a tensor that the caller does not use any more. Its result is that of ``compute``.

        A move that has nothing to wait for, or no such collective, is done at once.
        """
        return finished(cls.compute(x, axis, *options))

    @staticmethod
    def conjugate(*options: Any) -> tuple[type[Move], tuple[Any, ...]]:
        raise NotImplementedError


def _move(kind: type[Move]) -> type[Move]:
    """Gives a move its forward and backward: torch hands a forward no class, and these need it."""

    def forward(ctx: Any, x: Tensor, axis: Axis, *options: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.options = axis, options
        return kind.compute(x, axis, *options)

    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        nothing = (None,) * (1 + len(ctx.options))
        if g is None:
            return (None, *nothing)
        back, options = kind.conjugate(*ctx.options)
        if torch.is_grad_enabled():  # what is differentiated again is a part of the graph
            return (back.apply(g, ctx.axis, *options), *nothing)
        if back.still:
            # The gradient itself: autograd copies one that other nodes have too, and a view would hide that they do.
            return (g, *nothing)
        with without_modes():
            return (back.compute(g, ctx.axis, *options), *nothing)

    kind.forward, kind.backward = staticmethod(forward), staticmethod(backward)  # type: ignore[method-assign]
    return kind


@_move
class CopyIn(Move):
    still = True

    @staticmethod
    def compute(x: Tensor, axis: Axis, wide: bool = False) -> Tensor:
        return x.detach()  # not a view of x, which x, that remembers it, would keep alive for ever; versions are shared

    @staticmethod
    def conjugate(wide: bool = False) -> tuple[type[Move], tuple[Any, ...]]:
        return AllReduce, (wide,)


@_move
class AllReduce(Move):
    """``wide``: half-precision summands are added up in float32."""

    @staticmethod
    def compute(x: Tensor, axis: Axis, wide: bool = False) -> Tensor:
        if wide and x.dtype in (torch.bfloat16, torch.float16):
            return axis.all_reduce(x.float()).to(x.dtype)
        return axis.all_reduce(x)

    @classmethod
    def begin(cls, x: Tensor, axis: Axis, wide: bool = False) -> Finish:
        return super().begin(x, axis, wide) if wide else axis.begin_all_reduce(x)

    @staticmethod
    def conjugate(wide: bool = False) -> tuple[type[Move], tuple[Any, ...]]:
        return CopyIn, (False,)


@_move
class ReduceScatter(Move):
    @staticmethod
    def compute(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        return axis.reduce_scatter(x, layout)

    @classmethod
    def begin(cls, x: Tensor, axis: Axis, layout: Shard) -> Finish:
        return axis.begin_reduce_scatter(x, layout)

    @staticmethod
    def conjugate(layout: Shard) -> tuple[type[Move], tuple[Any, ...]]:
        return AllGatherIn, (layout,)


@_move
class AllGather(Move):
    @staticmethod
    def compute(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        return axis.all_gather(x, layout)

    @staticmethod
    def conjugate(layout: Shard) -> tuple[type[Move], tuple[Any, ...]]:
        return KeepSlice, (layout,)


@_move
class AllGatherIn(Move):
    @staticmethod
    def compute(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        return axis.all_gather(x, layout)

    @staticmethod
    def conjugate(layout: Shard) -> tuple[type[Move], tuple[Any, ...]]:
        return ReduceScatter, (layout,)


@_move
class KeepSlice(Move):
    @staticmethod
    def compute(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
        # A copy: a view made inside a Function could not be written to in place by the model.
        return layout.take(x, axis.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def conjugate(layout: Shard) -> tuple[type[Move], tuple[Any, ...]]:
        return AllGather, (layout,)


@_move
class AllToAll(Move):
    @staticmethod
    def compute(x: Tensor, axis: Axis, source: Shard, target: Shard) -> Tensor:
        return axis.all_to_all(x, source, target)

    @staticmethod
    def conjugate(source: Shard, target: Shard) -> tuple[type[Move], tuple[Any, ...]]:
        return AllToAll, (target, source)


@_move
class KeepFirst(Move):
    @staticmethod
    def compute(x: Tensor, axis: Axis) -> Tensor:
        return x.clone() if axis.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def conjugate() -> tuple[type[Move], tuple[Any, ...]]:
        return Release, ()


@_move
class Release(Move):
    """The gradient of ``KeepFirst``: nothing moves, and its own gradient is kept again."""

    still = True

    @staticmethod
    def compute(x: Tensor, axis: Axis) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def conjugate() -> tuple[type[Move], tuple[Any, ...]]:
        return KeepFirst, ()


def copy_in(x: Tensor, axis: Axis, *, wide: bool = False) -> Tensor:
    """A full tensor, as used by sharded work: its gradient is summed over the axis.

    ``wide``: sum half-precision gradients in float32 (parameters: FSDP's ``reduce_dtype`` does not reach this sum).
    """
    return CopyIn.apply(x, axis, wide) if _differentiable(x) else x


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Partial → Replicate."""
    return AllReduce.apply(x, axis, False)


def reduce_scatter(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Partial → Shard."""
    return ReduceScatter.apply(x, axis, layout)


def all_gather(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Shard → Replicate, to be used whole."""
    return AllGather.apply(x, axis, layout)


def all_gather_in(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Shard → Replicate, to be used by sharded work."""
    return AllGatherIn.apply(x, axis, layout)


def keep_slice(x: Tensor, axis: Axis, layout: Shard) -> Tensor:
    """Replicate → Shard."""
    return KeepSlice.apply(x, axis, layout) if _differentiable(x) else layout.take(x, axis.rank)


def all_to_all(x: Tensor, axis: Axis, source: Shard, target: Shard) -> Tensor:
    """Shard → Shard of another dim."""
    return AllToAll.apply(x, axis, source, target)


def keep_first(x: Tensor, axis: Axis) -> Tensor:
    """Replicate → Partial."""
    return KeepFirst.apply(x, axis)


def keep_first_backward(x: Tensor, axis: Axis) -> Tensor:
    """The gradient of a summand, which is the same on every rank, as a full tensor: nothing moves."""
    return Release.apply(x, axis)


def _differentiable(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
