"""Losses on cut predictions.

Cross entropy with the logits cut over the classes never gathers them: the maximum, the sum of exponentials and the
target's logit are each one all-reduce of a number a row (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Cut
from meshwright.view import moves
from meshwright.view.rules.reduction import exponentials, summed
from meshwright.view.rules.registry import named, rule
from meshwright.view.rules.types import result_type, wide

ORDER = "input target weight size_average ignore_index reduce reduction label_smoothing"


@rule("cross_entropy")  # not of torch._C._nn.cross_entropy_loss: other arguments
def cross_entropy(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named(ORDER, args, kwargs, reduction="mean", ignore_index=-100, label_smoothing=0.0)
    x, target = names["input"], work.whole(names["target"])
    layout = work.layout(x)
    old_style = names.get("size_average") is not None or names.get("reduce") is not None
    if not isinstance(layout, Cut) or old_style or target.is_floating_point() or x.dim() < 2:
        return NotImplemented
    weight = work.whole(names.get("weight"))
    dtype = _result_type(func, x._mw_local)
    count = _denominator(target, weight, names["ignore_index"])
    if layout.dim != 1:
        return _rows_cut(work, x._mw_local, target, weight, layout, names, count, dtype)
    if layout.parts != 1 or weight is not None or names["label_smoothing"]:
        return NotImplemented
    losses = vocabulary_losses(work, x._mw_local, target, layout, names["ignore_index"])
    return _reduced(losses, names["reduction"], count).to(dtype)


def _result_type(func: Any, x: Tensor) -> torch.dtype:
    return result_type(lambda one: func(one.flatten()[None], torch.zeros(1, dtype=torch.long, device=x.device)), x)


def _denominator(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by: the number (or the weights) of the labels that count."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return (weight[torch.where(valid, target, 0)] * valid).sum()


def _reduced(losses: Tensor, reduction: str, count: Tensor) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / count if reduction == "mean" else losses.sum()


def vocabulary_losses(work: Any, x: Tensor, target: Tensor, layout: Cut, ignore_index: int) -> Tensor:
    """The loss of each row, in the wide type; ``x``: this rank's classes, at dim 1 of shape (rows, classes, …)."""
    axis = work.axis
    shifted, sums = exponentials(work, x, 1)
    start = sum(layout.pieces[0][: axis.rank])
    local = target.unsqueeze(1) - start
    mine = (local >= 0) & (local < x.size(1))
    if x.size(1):
        picked = shifted.gather(1, local.clamp(0, x.size(1) - 1)) * mine
    else:
        picked = shifted.sum(1, keepdim=True)
    losses = (sums.log() - moves.reduce(picked, axis)).squeeze(1)
    return torch.where(target == ignore_index, torch.zeros_like(losses), losses)


def _rows_cut(
    work: Any, x: Tensor, target: Tensor, weight: Any, layout: Cut, names: dict[str, Any], count: Tensor, dtype: Any
) -> Any:
    """Logits cut over rows (or over a dim after the classes): each rank's rows alone, one sum."""
    dim = layout.dim if layout.dim == 0 else layout.dim - 1
    own = layout.on(dim)
    options = {"ignore_index": names["ignore_index"], "label_smoothing": names["label_smoothing"], "weight": weight}
    target = work.cut(target, own)
    losses = functional.cross_entropy(x, target, reduction="none", **options)
    if names["reduction"] == "none":
        return work.view(losses, own)
    total = losses.sum(dtype=wide(losses.dtype))
    return summed(work, total / count if names["reduction"] == "mean" else total, dtype)


_ELEMENTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
poisson_nll_loss
""".split()


@rule(*_ELEMENTWISE)
def elementwise(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses of each element: the elements as a pointwise function, then the mean or sum over all."""
    options = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor)}
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
    reduction = options.pop("reduction", "mean")
    old_style = options.get("size_average") is not None or options.get("reduce") is not None
    if not isinstance(func, FunctionType):
        return NotImplemented  # a builtin: its reduction is a number
    if old_style or len(args) > 2 or not all(isinstance(a, Tensor) for a in args) or reduction == "batchmean":
        return NotImplemented
    if "weight" in tensors and not func.__name__.startswith("binary"):
        return NotImplemented  # their mean is over the weights
    if len({tuple(t.shape) for t in (*args, *tensors.values())}) > 1:
        return NotImplemented
    cuts = [layout for t in (*args, *tensors.values()) if isinstance(layout := work.layout(t), Cut)]
    if not cuts:
        return NotImplemented
    own = cuts[0]
    losses = func(
        *(work.cut(a, own) for a in args), **options, **{k: work.cut(v, own) for k, v in tensors.items()},
        reduction="none",
    )  # fmt: skip
    each = work.view(losses, own)
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()
