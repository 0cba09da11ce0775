"""Functions over dims: local where the cut dim is not reduced; a sum or mean over it gives a lazy partial sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, Cut, Partial
from meshwright.view import moves
from meshwright.view.rules.registry import named, rule
from meshwright.view.rules.types import result_type, wide


def dims_of(given: Any, rank: int) -> list[int]:
    """The dims an argument names; all of them for None or ()."""
    if given is None or (isinstance(given, (tuple, list)) and not given):
        return list(range(rank))
    return [d % max(rank, 1) for d in (given if isinstance(given, (tuple, list)) else (given,))]


def after_reduction(layout: Cut, dims: Sequence[int], keepdim: bool) -> Cut:
    return layout if keepdim else layout.on(layout.dim - sum(d < layout.dim for d in dims))


@rule("sum", "mean", "nansum")
def total(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("input dim keepdim", args, kwargs)
    x = names.pop("input")
    layout = work.layout(x)
    if not isinstance(layout, (Cut, Partial)) or names.get("out") is not None:
        return NotImplemented
    if isinstance(layout, Partial):
        if func.__name__ == "nansum":
            return NotImplemented
        return work.view(func(x._mw_local, **names), PARTIAL)
    dims = dims_of(names.get("dim", names.get("axis")), x.dim())
    keepdim = bool(names.get("keepdim", False))
    if layout.dim not in dims:
        return work.view(func(x._mw_local, **names), after_reduction(layout, dims, keepdim))
    dtype = result_type(func, x._mw_local, dtype=names.get("dtype"))
    add_up = torch.sum if func.__name__ == "mean" else func
    local = add_up(x._mw_local, dims, keepdim, dtype=wide(dtype))
    if func.__name__ == "mean":  # before it is rounded: in float16 the sum may be infinite, and its mean is not
        local = local / prod(x.shape[d] for d in dims)
    return summed(work, local, dtype)


def summed(work: Any, local: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over ranks of ``local``, in ``dtype``: left partial, unless it is still to be rounded, which is done once."""
    if local.dtype == dtype:
        partial: Tensor = work.view(local, PARTIAL)
        return partial
    return moves.reduce(local, work.axis).to(dtype)


@rule("amax", "amin", "prod", "all", "any", "argmax", "argmin", "var", "std", "logsumexp", "norm", "max", "min",
      "median", "count_nonzero", "vector_norm", "var_mean", "std_mean")  # fmt: skip
def over_dims(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Local where the cut dim is not reduced."""
    order = "input p dim keepdim" if "norm" in func.__name__ else "input dim keepdim"  # of torch.linalg as well
    if func.__name__ in ("var", "std", "var_mean", "std_mean") and len(args) > 2:
        order = "input dim unbiased keepdim"
    names = named(order, args, kwargs)
    layout = work.layout(names.get("input"))
    if not isinstance(layout, Cut) or names.get("out") is not None or isinstance(names.get("dim"), Tensor):
        return NotImplemented
    x = names["input"]
    keepdim = bool(names.get("keepdim", False))
    dims = dims_of(names.get("dim", names.get("axis")), x.dim())
    if isinstance(names.get("dim"), bool) or layout.dim in dims:
        return NotImplemented
    result = func(x._mw_local, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    out = after_reduction(layout, dims, keepdim)
    if isinstance(result, Tensor):
        return work.view(result, out)
    return type(result)([work.view(t, out) for t in result])


@rule("cumsum", "cumprod", "sort", "argsort", "topk", "logcumsumexp", "cummax", "cummin", "glu")
def along_one_dim(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Local where the cut dim is not the one worked along."""
    place = 2 if func.__name__ == "topk" else 1
    x = args[0]
    layout = work.layout(x)
    dim = args[place] if len(args) > place else kwargs.get("dim", -1)
    if not isinstance(layout, Cut) or isinstance(dim, str) or layout.dim == dim % x.dim():
        return NotImplemented
    result = func(x._mw_local, *args[1:], **kwargs)
    if isinstance(result, Tensor):
        return work.view(result, layout)
    return type(result)([work.view(t, layout) for t in result])


@rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = "input dim _stacklevel dtype" if isinstance(func, FunctionType) else "input dim dtype"
    names = named("input dim half_to_float" if func.__name__.startswith("_") else order, args, kwargs)
    x, dim = names.pop("input"), names.get("dim")
    layout = work.layout(x)
    if not isinstance(layout, Cut) or not isinstance(dim, int):
        return NotImplemented
    dim %= x.dim()
    if layout.dim != dim:
        return work.view(func(x._mw_local, **names), layout)
    dtype = result_type(func, x._mw_local, **names)
    shifted, sums = exponentials(work, x._mw_local.to(dtype), dim)
    sums = moves.enter(sums, work.axis)
    local = shifted - sums.log() if "log_softmax" in func.__name__ else shifted.exp() / sums
    return work.view(local.to(dtype), layout)


def exponentials(work: Any, local: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Over a cut dim: the values less their maximum (cut), and the sum of their exponentials (whole); in the wide type."""
    local = local.to(wide(local.dtype))
    floor = torch.finfo(local.dtype).min
    if local.size(dim):
        top = local.detach().amax(dim, keepdim=True)
    else:
        top = local.new_full([1 if d == dim else n for d, n in enumerate(local.shape)], floor)
    top = work.axis.all_reduce(top, "max")
    shifted = local - top.clamp(min=floor)
    return shifted, moves.reduce(shifted.exp().sum(dim, keepdim=True), work.axis)


@rule("one_hot")
def one_hot(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    layout = work.layout(args[0])
    if not isinstance(layout, Cut) or classes == -1:
        return NotImplemented
    return work.view(func(args[0]._mw_local, classes), layout)
