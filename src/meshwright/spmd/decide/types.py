"""Dtypes of functions that a decision computes in several steps: the result's, and the one to accumulate in.

    result type        the dtype of the whole function's result, by argument, ``dtype=`` and autocast       ``result_type``
    accumulation type  torch adds up and exponentiates half types in float32, and rounds once, at the end   ``sum_dtype``

So a decision that computes a function in several steps does all of them in the accumulation type, collectives included, and
rounds to the result type at the end. If the function itself runs on local tensors, torch sees to both: autocast decides per
function, and operands are promoted by dtype and number of dims, which a local tensor shares with the whole.

Not promised: sums of *products* (a linear sharded by row, a convolution sharded by input channels) are partial sums in the
dtype of the product. Each rank's summand is rounded to that dtype before the summands are added, as in Megatron-LM. One
device rounds the whole sum once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.private import without_any_mode, without_modes

HALF = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds up values of ``dtype``: float32 for half types."""
    return torch.float32 if dtype in HALF else dtype


def result_type(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> torch.dtype:
    """The dtype of ``func(x, ...)`` under the current autocast. Torch is asked, with a tensor of one element like ``x``.

    Raises what ``func`` raises for such a tensor: a mean of integers, say.
    """
    # On a CPU no mode sees this: a rehearsal would take it for a function of the step. Another device may be one that only a
    # dispatch mode knows.
    with without_any_mode() if x.device.type == "cpu" else without_modes(), torch.no_grad():
        one = torch.zeros((1,) * x.dim(), dtype=x.dtype, device=x.device)
        dtype: torch.dtype = func(one, *args, **kwargs).dtype
    return dtype


def as_autocast(x: Any) -> Any:
    """A tensor, cast as autocast casts the arguments of a function that computes in a half type; anything else unchanged.

    For a decision that computes such a function in steps: the steps then run with autocast off, as within the function.
    """
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    eligible = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if eligible else x


def like_here(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> tuple[torch.dtype, torch.device] | None:
    """(dtype, device) of ``func(x, ...)``; None if the result is no tensor. Torch is asked, with an empty tensor like ``x``."""
    with without_any_mode(), torch.no_grad():
        result = func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    if not isinstance(result, Tensor):
        return None
    return result.dtype, x.device if x.device.type == "meta" else result.device  # planning: everything is on meta
