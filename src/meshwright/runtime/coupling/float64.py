"""``Wide``: a forward in float64, at weights moved off their values, whatever the model computes in and holds.

A trial asks whether two ways to the same loss give the same number. In bfloat16 they differ by rounding as much as a
batch norm makes them differ; at initial weights a router is uniform and a gate is zero, and what they do is not seen yet.
So a trial computes in float64, and with other weights. Nothing is converted where it is held: a parameter is converted
for each function that takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.private import pytree
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import GET_DATA, SET_DATA, is_fact, writes

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = {Tensor.float: Tensor.double, Tensor.half: Tensor.double, Tensor.bfloat16: Tensor.double}
_CONVERSIONS = frozenset([*_CASTS, Tensor.double, Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.contiguous])
_NAMES = ("torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor")
_LOOKUPS = frozenset(["embedding", "embedding_bag"])  # a large table would be converted for the few rows that are read


@contextmanager
def wide(*, perturbed: bool) -> Iterator[None]:
    """For the time of a forward, torch functions compute in float64.

    Args:
        perturbed: parameters are a little off their values; the same in every forward.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide(perturbed=perturbed):
            yield
    finally:
        torch.set_default_dtype(before)


class Wide(FunctionMode):
    """Gives torch functions their floating tensors in float64; a function that refuses gets them as they are."""

    def __init__(self, *, perturbed: bool) -> None:
        super().__init__()
        self._perturbed = perturbed
        self._converted = TensorTable[Tensor]()  # the parameter that was converted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA and isinstance(args[1], Tensor) and self._converted.of(args[1]) is args[0]:
            return None  # ``module.to(dtype)`` in a forward: a parameter of whichever type is wide to functions
        if func == SET_DATA and isinstance(args[1], Tensor) and args[0].is_floating_point():
            return func(args[0], args[1].to(args[0].dtype))
        if func == _DTYPE and args[0].dtype in _NARROW and not args[0].is_meta:
            return torch.float64  # as it is to all functions: a module may compare its input's type with its weight's
        if func == GET_DATA or is_fact(func) or getattr(func, "__name__", "") in _LOOKUPS:
            return func(*args, **kwargs)  # (what is written to the data of a parameter is written to it, of its type)
        if GlobalTensor in types:  # of a function whose body is run beside the view: what each rank computes is wide
            with self:
                return GlobalTensor.__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], Tensor) and (writes(func, args, kwargs) or "out" in kwargs):
            return self._write(func, args, kwargs)
        if func in _CONVERSIONS and args[0].dtype in _NARROW and (same := func(*args, **kwargs)) is args[0]:
            return same  # ``module.to(device)`` in a forward leaves its parameters as they are
        try:
            more, named = pytree.tree_map(self._wide, (args, kwargs))
            result = _CASTS.get(func, func)(*more, **named)
        except Exception:
            return self._refused(func, args, kwargs)
        if func in _CONVERSIONS and is_parameter(args[0]):
            self._converted.note([result], args[0])
        return result

    def _refused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that does not compute in float64 with what it is given (``grouped_mm``): with that as it is, or rounded.
        An error of the model's own comes again."""
        try:
            return func(*args, **kwargs)
        except Exception:
            rounded, named = pytree.tree_map(_rounded, (args, kwargs))
            return pytree.tree_map(self._wide, func(*rounded, **named))

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A write keeps the type of the tensor that it writes to."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # a few, with an index, refuse values of another type
            dtype = args[0].dtype
            as_target = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
            more, named = pytree.tree_map(as_target, (args[1:], kwargs))
            return func(args[0], *more, **named)

    def _wide(self, x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return torch.float64 if x in _NARROW else x
        if isinstance(x, str):
            return "torch.DoubleTensor" if x in _NAMES else x
        if type(x) not in (Tensor, nn.Parameter) or x.dtype not in _NARROW or x.is_meta:
            return x
        return _moved_off(x) if is_parameter(x) and self._perturbed else x.double()


def _rounded(x: Any) -> Any:
    return x.float() if type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float64 else x


def _moved_off(p: Tensor) -> Tensor:
    """A parameter in float64, moved by a tenth of its size and a little more, in a pattern that follows from places alone:
    zeros and ones are none any more, and rows that were alike differ."""
    x = p.double()
    size = 0.1 * x.detach().square().mean().sqrt() + 0.01 if x.numel() else 0.0
    places = torch.arange(x.numel(), dtype=torch.float64, device=x.device)
    return x + size * torch.sin(0.37 * places * places + 1.3 * places + 0.7).view(x.shape)
