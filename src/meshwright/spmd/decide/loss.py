"""Losses of sharded predictions.

Cross entropy never gathers logits that are sharded over the classes. The maximum, the sum of exponentials and the logit of
the target are one all-reduce each, of one number a row (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import PARTIAL, REPLICATE, Shard
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis
from meshwright.spmd.decide.reduction import exponentials
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decide.types import result_type, sum_dtype
from meshwright.spmd.decision import GATHER, Answer, Body, Decision, use_as, use_local, use_original, use_replicated
from meshwright.spmd.signature import Call, Operand, layout_of

ORDER = "input target weight size_average ignore_index reduce reduction label_smoothing"


@decider("cross_entropy")  # not for torch._C._nn.cross_entropy_loss, whose arguments differ
def cross_entropy(call: Call) -> Answer:
    """Logits sharded over classes (dim 1) or over any other dim; the target is sharded alike, or whole."""
    names = named(ORDER, call.args, call.kwargs, reduction="mean", ignore_index=-100, label_smoothing=0.0)
    x, target, weight, reduction = names["input"], names["target"], names.get("weight"), names["reduction"]
    layout = layout_of(x)
    old_style = names.get("size_average") is not None or names.get("reduce") is not None
    if not isinstance(layout, Shard) or old_style or target.is_floating_point() or x.dim() < 2:
        return GATHER
    dtype, ignore = _result_type(call.func, x), names["ignore_index"]
    if layout.dim == 1:
        if layout.parts != 1 or weight is not None or names["label_smoothing"]:
            return GATHER
        start = sum(layout.pieces[0][: call.rank])
        return Decision(
            _of_vocabulary, (use_local(x), use_replicated(target), start, ignore, reduction, dtype), {}, axis=True
        )
    dim = layout.dim if layout.dim == 0 else layout.dim - 1
    options = {"ignore_index": ignore, "label_smoothing": names["label_smoothing"], "weight": use_replicated(weight)}
    if reduction == "none":
        return Decision(
            functional.cross_entropy,
            (use_local(x), use_as(target, layout.on(dim))),
            {**options, "reduction": "none"},
            layout.on(dim),
        )
    args = (use_local(x), use_replicated(target), layout.on(dim), reduction, dtype)
    if dtype == sum_dtype(dtype):
        return Decision(_of_rows, args, options, PARTIAL, axis=True)
    return Decision(_of_rows_rounded, args, options, REPLICATE, axis=True)


def _result_type(func: Any, x: Operand) -> torch.dtype:
    return result_type(lambda one: func(one.flatten()[None], torch.zeros(1, dtype=torch.long, device=x.device)), x)


def _denominator(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean: the number of the labels that are not ignored, or the sum of their class weights."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return (weight[torch.where(valid, target, 0)] * valid).sum()


def _reduced(losses: Tensor, reduction: str, count: Tensor) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / count if reduction == "mean" else losses.sum()


def _of_vocabulary(
    axis: Axis, x: Tensor, target: Tensor, start: int, ignore_index: int, reduction: str, dtype: torch.dtype
) -> Tensor:
    """Cross entropy of logits that are sharded over the classes; ``x`` has this rank's, from class ``start``."""
    losses = vocabulary_losses(axis, x, target, start, ignore_index)
    return _reduced(losses, reduction, _denominator(target, None, ignore_index)).to(dtype)


def vocabulary_losses(axis: Axis, x: Tensor, target: Tensor, start: int, ignore_index: int) -> Tensor:
    """The loss of each row, in the accumulation type. ``x``: logits of this rank's classes, (rows, classes, …)."""
    shifted, sums = exponentials(axis, x, 1)
    local = target.unsqueeze(1) - start
    mine = (local >= 0) & (local < x.size(1))
    if x.size(1):
        picked = shifted.gather(1, local.clamp(0, x.size(1) - 1)) * mine
    else:
        picked = shifted.sum(1, keepdim=True)
    losses = (sums.log() - redistribute.all_reduce(picked, axis)).squeeze(1)
    return torch.where(target == ignore_index, torch.zeros_like(losses), losses)


def _of_rows(
    axis: Axis,
    x: Tensor,
    target: Tensor,
    layout: Shard,
    reduction: str,
    dtype: torch.dtype,
    *,
    weight: Any,
    **options: Any,
) -> Tensor:
    """This rank's summand of the loss, in the accumulation type, if logits are sharded over rows or over a dim after the
    classes.

    ``target``, ``weight``: full tensors; ``layout``: the layout in which the target is to be taken.
    """
    count = _denominator(target, weight, options["ignore_index"])
    target = layout.take(target, axis.rank)
    losses = functional.cross_entropy(x, target, weight=weight, reduction="none", **options)
    total = losses.sum(dtype=sum_dtype(losses.dtype))
    return total / count if reduction == "mean" else total


def _of_rows_rounded(
    axis: Axis, x: Tensor, target: Tensor, layout: Shard, reduction: str, dtype: Any, **options: Any
) -> Tensor:
    """The whole loss, by the arguments of ``_of_rows``: the summands are added up, then rounded once."""
    return redistribute.all_reduce(_of_rows(axis, x, target, layout, reduction, dtype, **options), axis).to(dtype)


_ELEMENTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
poisson_nll_loss
""".split()


@decider(*_ELEMENTWISE)
def elementwise(call: Call) -> Answer:
    """Elementwise losses: first an elementwise function, then the mean or the sum over all elements."""
    func, args, kwargs = call.func, call.args, call.kwargs
    options = {k: v for k, v in kwargs.items() if not isinstance(v, Operand)}
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, Operand)}
    reduction = options.pop("reduction", "mean")
    old_style = options.get("size_average") is not None or options.get("reduce") is not None
    if not isinstance(func, FunctionType):
        return GATHER  # a builtin function, whose reduction is a number
    if old_style or len(args) > 2 or not all(isinstance(a, Operand) for a in args) or reduction == "batchmean":
        return GATHER
    if "weight" in tensors and not call.name.startswith("binary"):
        return GATHER  # their mean divides by the weights
    if len({tuple(t.shape) for t in call.operands}) > 1:
        return GATHER
    layouts = [t.layout for t in call.operands if isinstance(t.layout, Shard)]
    if not layouts:
        return GATHER
    if reduction != "none":
        return Body(
            _reduced_losses,
            (func, reduction, *map(use_original, args)),
            {**options, **{k: use_original(v) for k, v in tensors.items()}},
        )
    named_uses = {k: use_as(v, layouts[0]) for k, v in tensors.items()}
    uses = tuple(use_as(a, layouts[0]) for a in args)
    return Decision(func, uses, {**options, **named_uses, "reduction": "none"}, layouts[0])


def _reduced_losses(func: Any, reduction: str, *args: Any, **options: Any) -> Tensor:
    losses: Tensor = func(*args, **options, reduction="none")
    return losses.mean() if reduction == "mean" else losses.sum()
