"""Types: what a rule takes apart must come out in the type of the whole function, and be as exact.

    result        what the whole function gives, for its argument's type, ``dtype=`` and autocast   ``result_type``
    accumulation  torch adds up and exponentiates half types in float32 and rounds once, at the end ``wide``

So a rule that does a function's work in several steps computes them in the wide type, collectives among them, and rounds
to the result's type at the end. Where a rule runs the function itself on local tensors, torch sees to both: autocast
decides per function, and locals have the type and the number of dims of the whole, by which operands are promoted.

Not promised: sums of *products* (a linear cut by row, a convolution cut by input channels) are partial sums in the
product's own type. Each rank's summand is rounded to that type before they are added, as in Megatron-LM; one device
rounds the whole sum once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.private import without_modes

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch adds up values of ``dtype``."""
    return torch.float32 if dtype in HALF else dtype


def result_type(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> torch.dtype:
    """The type of ``func(x, ...)`` here and now: asked of torch itself, with a tensor of one element like ``x``.

    Raises what ``func`` raises for such a tensor: a mean of integers, say.
    """
    with without_modes(), torch.no_grad():
        found: torch.dtype = func(x.new_zeros((1,) * x.dim()), *args, **kwargs).dtype
    return found
