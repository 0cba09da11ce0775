"""Torch functions that are means over labels. Their divisor, the number of labels, must be the global one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

LOSSES = (functional.cross_entropy, functional.nll_loss)
_ORDER = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def mean_target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, int] | None:
    """(target, class weights, ignored label) of a call of a loss that is a mean over its labels; None for any other call."""
    if func not in LOSSES:
        return None
    names: dict[str, Any] = {"reduction": "mean", "ignore_index": -100}
    names |= dict(zip(_ORDER, args, strict=False)) | kwargs
    target = names.get("target")
    if names["reduction"] != "mean" or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return target, names.get("weight"), names["ignore_index"]
