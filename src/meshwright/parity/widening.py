"""``widened``: the function mode of a check in float64, which turns casts to float32 into casts to float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.private import function_mode_at, function_modes
from meshwright.spmd.autograd_functions import FunctionMode, Segment, recomputations


class Widening(FunctionMode):
    """Turns casts to float32 into casts to float64. Changes nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(_widened(a) for a in args)
        return func(*args, **{name: _widened(value) for name, value in kwargs.items()})


def _also_again(mode: Widening, function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
    """(the function to checkpoint, its arguments), so that ``mode`` is on when a backward runs the function again. The mode is
    off while it answers a call of the backward."""

    def again(*kept: Any, **named: Any) -> Any:
        is_on = any(function_mode_at(i) is mode for i in range(function_modes()))
        with nullcontext() if is_on else mode:
            return function(*kept, **named)

    return again, args


def _widened(x: Any) -> Any:
    """An argument of a torch function: float64 in place of float32; other arguments as they are."""
    if x is torch.float32:
        return torch.float64
    return "torch.DoubleTensor" if isinstance(x, str) and x == "torch.FloatTensor" else x


@contextmanager
def widened(dtype: torch.dtype) -> Iterator[None]:
    """In its block, if ``dtype`` is float64, tensors that a model casts to float32 or makes in the default type are float64.

    A cast to float32 rounds to 1e-7, which would hide smaller errors. Entered before the job's SPMD mode, so that it sees the
    local functions that the dispatcher calls.
    """
    if dtype is not torch.float64:
        yield
        return
    default_before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening() as mode, recomputations(partial(_also_again, mode)):
            yield
    finally:
        torch.set_default_dtype(default_before)
