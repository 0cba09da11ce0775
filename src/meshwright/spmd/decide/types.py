"""Types: what a rule takes apart must come out in the type of the whole function, and be as exact.

    result        what the whole function gives, for its argument's type, ``dtype=`` and autocast   ``result_type``
    accumulation  torch adds up and exponentiates half types in float32 and rounds once, at the end ``wide``

So a rule that does a function's work in several steps computes them in the wide type, collectives among them, and rounds
to the result's type at the end. Where a rule runs the function itself on local tensors, torch sees to both: autocast
decides per function, and locals have the type and the number of dims of the whole, by which operands are promoted.

Not promised: sums of *products* (a linear sharded by row, a convolution cut by input channels) are partial sums in the
product's own type. Each rank's summand is rounded to that type before they are added, as in Megatron-LM; one device
rounds the whole sum once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.private import without_any_mode, without_modes

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch adds up values of ``dtype``."""
    return torch.float32 if dtype in HALF else dtype


def result_type(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> torch.dtype:
    """The type of ``func(x, ...)`` here and now: asked of torch itself, with a tensor of one element like ``x``.

    Raises what ``func`` raises for such a tensor: a mean of integers, say.
    """
    with without_modes(), torch.no_grad():
        one = torch.zeros((1,) * x.dim(), dtype=x.dtype, device=x.device)
        dtype: torch.dtype = func(one, *args, **kwargs).dtype
    return dtype


def as_autocast(x: Any) -> Any:
    """A tensor as autocast hands it to a function that it computes in a half type; anything else as it is.

    For a rule that takes such a function apart: its steps then run with autocast off, as they do within the function.
    """
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    eligible = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if eligible else x


def like_here(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> tuple[torch.dtype, torch.device] | None:
    """The type and device of ``func(x, ...)``, asked of torch with an empty tensor like ``x``; None if it gives no tensor."""
    with without_any_mode(), torch.no_grad():
        result = func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    if not isinstance(result, Tensor):
        return None
    return result.dtype, x.device if x.device.type == "meta" else result.device  # planning: everything is on meta
