"""Reductions: they run on local tensors if the sharded dim is not reduced; a sum or mean over it gives a lazy partial sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, Partial, Shard
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis
from meshwright.spmd.decide.pointwise import of_each
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decide.types import result_type, sum_dtype
from meshwright.spmd.decision import GATHER, Answer, Decision, use_local
from meshwright.spmd.signature import Call, Operand, layout_of


def dims_of(dim: Any, rank: int) -> list[int]:
    """The dims that an argument names, from 0 to ``rank - 1``; all of them for None or ()."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(rank))
    return [d % max(rank, 1) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]


def after_reduction(layout: Shard, dims: Sequence[int], keepdim: bool) -> Shard:
    """The layout of the result of a reduction over ``dims``, which do not include the sharded dim."""
    return layout if keepdim else layout.on(layout.dim - sum(d < layout.dim for d in dims))


@decider("sum", "mean", "nansum")
def total(call: Call) -> Answer:
    """Sums and means: local if the sharded dim is not reduced, else a partial sum."""
    func, names = call.func, named("input dim keepdim", call.args, call.kwargs)
    x = names.pop("input")
    layout = layout_of(x)
    if isinstance(layout, Partial):
        return GATHER if call.name == "nansum" else Decision(func, (use_local(x),), names, PARTIAL)
    if not isinstance(layout, Shard):
        return GATHER
    dims = dims_of(names.get("dim", names.get("axis")), x.dim())
    keepdim = bool(names.get("keepdim", False))
    if layout.dim not in dims:
        return Decision(func, (use_local(x),), names, after_reduction(layout, dims, keepdim))
    count = prod(x.shape[d] for d in dims) if call.name == "mean" else None
    dtype = result_type(func, x, dtype=names.get("dtype"))
    add_up = torch.sum if call.name == "mean" else func
    if dtype == sum_dtype(dtype):
        return Decision(_added_up, (use_local(x), add_up, dims, keepdim, dtype, count), {}, PARTIAL)
    return Decision(_added_up_and_rounded, (use_local(x), add_up, dims, keepdim, dtype, count), {}, axis=True)


def _added_up(x: Tensor, add_up: Any, dims: list[int], keepdim: bool, dtype: torch.dtype, count: int | None) -> Tensor:
    """This rank's summand of a sum over ``dims``, or of a mean of ``count`` elements, in the accumulation type."""
    local: Tensor = add_up(x, dims, keepdim, dtype=sum_dtype(dtype))
    # Divided before it is rounded: in float16 a sum may be infinite although the mean is not.
    return local if count is None else local / count


def _added_up_and_rounded(
    axis: Axis, x: Tensor, add_up: Any, dims: Any, keepdim: bool, dtype: Any, count: Any
) -> Tensor:
    """The whole sum or mean, by the arguments of ``_added_up``: the summands are added up, then rounded once."""
    return redistribute.all_reduce(_added_up(x, add_up, dims, keepdim, dtype, count), axis).to(dtype)


@decider("amax", "amin", "prod", "all", "any", "argmax", "argmin", "var", "std", "logsumexp", "norm", "max", "min",
      "median", "count_nonzero", "vector_norm", "var_mean", "std_mean")  # fmt: skip
def over_dims(call: Call) -> Answer:
    """Other reductions: they run on local tensors if the sharded dim is not reduced."""
    name, args = call.name, call.args
    order = "input p dim keepdim" if "norm" in name else "input dim keepdim"  # torch.linalg's norms too
    if name in ("var", "std", "var_mean", "std_mean") and len(args) > 2:
        order = "input dim unbiased keepdim"
    names = named(order, args, call.kwargs)
    x: Any = names.get("input")
    dim = names.get("dim")
    layout = layout_of(x)
    if not isinstance(layout, Shard) or isinstance(dim, (Operand, bool)):
        return GATHER
    dims = dims_of(names.get("dim", names.get("axis")), x.dim())
    if layout.dim in dims:
        return GATHER
    return of_each(call, use_local, after_reduction(layout, dims, bool(names.get("keepdim", False))))


@decider("cumsum", "cumprod", "sort", "argsort", "topk", "logcumsumexp", "cummax", "cummin", "glu")
def along_one_dim(call: Call) -> Answer:
    """Functions along one dim: they run on local tensors if another dim is sharded."""
    position = 2 if call.name == "topk" else 1  # of the argument ``dim``
    x = call.args[0]
    layout = layout_of(x)
    dim = call.args[position] if len(call.args) > position else call.kwargs.get("dim", -1)
    if not isinstance(layout, Shard) or isinstance(dim, str) or layout.dim == dim % x.dim():
        return GATHER
    return of_each(call, use_local, layout)


@decider("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(call: Call) -> Answer:
    """Local along another dim than the sharded one; along it, by a maximum and a sum over ranks."""
    func = call.func
    order = "input dim _stacklevel dtype" if isinstance(func, FunctionType) else "input dim dtype"
    names = named("input dim half_to_float" if call.name.startswith("_") else order, call.args, call.kwargs)
    x, dim = names.pop("input"), names.get("dim")
    layout = layout_of(x)
    if not isinstance(layout, Shard) or not isinstance(dim, int):
        return GATHER
    dim %= x.dim()
    if layout.dim != dim:
        return Decision(func, (use_local(x),), names, layout)
    dtype = result_type(func, x, **names)
    return Decision(_softmax_of_shard, (use_local(x), dim, dtype, "log_softmax" in call.name), {}, layout, axis=True)


def _softmax_of_shard(axis: Axis, x: Tensor, dim: int, dtype: torch.dtype, logarithm: bool) -> Tensor:
    """Softmax, or its logarithm, over the sharded dim: this rank's slice, in ``dtype``."""
    shifted, sums = exponentials(axis, x.to(dtype), dim)
    sums = redistribute.copy_in(sums, axis)
    return (shifted - sums.log() if logarithm else shifted.exp() / sums).to(dtype)


def exponentials(axis: Axis, local: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Over a sharded dim: (this rank's values minus the global maximum, the global sum of their exponentials), both in the
    accumulation type."""
    local = local.to(sum_dtype(local.dtype))
    floor = torch.finfo(local.dtype).min
    if local.size(dim):
        maximum = local.detach().amax(dim, keepdim=True)
    else:
        maximum = local.new_full([1 if d == dim else n for d, n in enumerate(local.shape)], floor)
    maximum = axis.all_reduce(maximum, "max")
    shifted = local - maximum.clamp(min=floor)
    return shifted, redistribute.all_reduce(shifted.exp().sum(dim, keepdim=True), axis)


@decider("one_hot")
def one_hot(call: Call) -> Answer:
    classes = call.args[1] if len(call.args) > 1 else call.kwargs.get("num_classes", -1)
    layout = layout_of(call.args[0])
    if not isinstance(layout, Shard) or classes == -1:
        return GATHER
    return of_each(call, use_local, layout)
