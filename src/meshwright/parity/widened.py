"""``widened``: in a check in float64, casts to float32 are casts to float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.spmd.autograd_functions import FunctionMode


class Widening(FunctionMode):
    """Makes casts to float32 casts to float64. It computes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(_widened(a) for a in args)
        return func(*args, **{name: _widened(value) for name, value in kwargs.items()})


def _widened(x: Any) -> Any:
    if x is torch.float32:
        return torch.float64
    return "torch.DoubleTensor" if isinstance(x, str) and x == "torch.FloatTensor" else x


@contextmanager
def widened(dtype: torch.dtype) -> Iterator[None]:
    """In a check in float64: what a model casts to float32, or makes without saying a type, is float64.

    Such a cast rounds to 1e-7, at places that differ between one device and a cut, and would drown the comparison.
    Entered before the job's view, so that it sees the local work of the view's rules.
    """
    if dtype is not torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening():
            yield
    finally:
        torch.set_default_dtype(before)
