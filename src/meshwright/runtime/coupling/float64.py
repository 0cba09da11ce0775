"""``Float64Mode``: a function mode for a forward in float64 with perturbed weights. The model may have any dtypes.

A trial compares two ways to compute the same loss. In bfloat16 rounding makes as large a difference as a batch norm. At initial
weights a router is uniform and a gate is zero, so that their effect does not show. So a trial computes in float64, and with
other weights. No parameter is changed: the mode converts it for each function that gets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.errors import OF_THE_RUN
from meshwright.private import pytree, storage_of
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.decide.gradient import ENGINES
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import GET_DATA, SET_DATA, aliases, is_fact, is_random, writes

_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the mode computes with tensors of a dtype."""
    return _WIDER.get(dtype, dtype)


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    Tensor.cfloat: Tensor.cdouble,  # type: ignore[attr-defined]
}
_CONVERSIONS = frozenset([*_CASTS, Tensor.double, Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.contiguous])
_NAMES = ("torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor")
_LOOKUPS = frozenset(
    ["embedding", "embedding_bag"]
)  # their tables are not converted: few rows of a large table are read


@contextmanager
def in_float64(*, perturbed: bool, written: Collection[Tensor] = ()) -> Iterator[None]:
    """While on, torch functions compute in float64.

    A checkpoint that recomputes within it runs to its end: the error by which it would stop earlier comes out of a torch
    function, and would be taken for a refusal of float64.

    Args:
        perturbed: whether parameters have slightly changed values, which are equal in every forward.
        written: the parameters that a forward may write to.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with set_checkpoint_early_stop(False), Float64Mode(perturbed=perturbed, written=written):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


class Float64Mode(FunctionMode):
    """Converts the floating-point arguments of torch functions to float64. A function that refuses them gets the original
    arguments."""

    def __init__(self, *, perturbed: bool, written: Collection[Tensor]) -> None:
        super().__init__()
        self._perturbed = perturbed
        self._written = {storage_of(local_tensor(p)) for p in written}
        self._converted = TensorTable[Tensor]()  # result of a conversion → the parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA and isinstance(args[1], Tensor) and self._converted.of(args[1]) is args[0]:
            return None  # ``module.to(dtype)`` in a forward: functions get the parameter in float64 in any case
        if func == SET_DATA and isinstance(args[1], Tensor) and _has_fractions(args[0]):
            return func(args[0], args[1].to(args[0].dtype))
        if func == _DTYPE and args[0].dtype in _WIDER and not args[0].is_meta:
            # The dtype that functions get: a module may compare the dtypes of its input and its weight.
            return _WIDER[args[0].dtype]
        if func == GET_DATA or is_fact(func) or _is_lookup(func, args, kwargs):
            return func(*args, **kwargs)  # (a write to ``p.data`` must reach the parameter, in its own dtype)
        if args and aliases(func) and self._is_written(args[0]):
            return func(*args, **kwargs)  # (so must a write to ``p.detach()`` or ``p[0]``)
        if args and _is_narrow(args[0]) and aliases(func) and func not in _CONVERSIONS and not is_random(func):
            view = func(*args, **kwargs)
            if _shares_memory(view, args[0]):
                return view  # (and one to a slice of a global variable, say)
        if GlobalTensor in types:  # in the Python body of a torch function: the local functions compute in float64
            with self:
                return GlobalTensor.__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], Tensor) and (writes(func, args, kwargs) or "out" in kwargs):
            return self._write(func, args, kwargs)
        if func in _CONVERSIONS and args[0].dtype in _WIDER and func(*args, **kwargs) is args[0]:
            return args[0]  # ``module.to(device)`` in a forward does not change its parameters
        if func in ENGINES:
            return self._differentiate(func, args, kwargs)
        try:
            wide_args, wide_kwargs = pytree.tree_map(self._wide, (args, kwargs))
            result = _CASTS.get(func, func)(*wide_args, **wide_kwargs)
        except OF_THE_RUN:
            raise
        except Exception:
            return self._refused(func, args, kwargs)
        if func in _CONVERSIONS and is_parameter(args[0]):
            self._converted.note([result], args[0])
        return result

    def _is_written(self, x: Any) -> bool:
        return bool(self._written) and type(x) in (Tensor, nn.Parameter) and storage_of(x) in self._written

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an engine of autograd with the tensors themselves: a copy of them in float64 has no gradient. Gradients that it
        is given become wider, if they must."""
        try:
            return func(*args, **kwargs)
        except OF_THE_RUN:
            raise
        except RuntimeError:
            # autograd.grad(outputs, inputs, given), autograd.backward(tensors, given)
            before, named = 2 if func is torch.autograd.grad else 1, _named(kwargs, "grad_outputs", "grad_tensors")
            given, named = pytree.tree_map(self._wide, (args[before : before + 1], named))
            return func(*args[:before], *given, *args[before + 1 :], **{**kwargs, **named})

    def _refused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that refuses float64 (``grouped_mm``) with the original arguments, or with arguments rounded to
        float32. An error of the model is raised again."""
        try:
            return func(*args, **kwargs)
        except OF_THE_RUN:
            raise
        except Exception:
            rounded_args, rounded_kwargs = pytree.tree_map(_rounded, (args, kwargs))
            return pytree.tree_map(self._wide, func(*rounded_args, **rounded_kwargs))

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that writes to its first argument, whose dtype stays."""
        target, *operands = args

        def as_target(x: Any) -> Any:
            return x.to(target.dtype) if isinstance(x, Tensor) and _has_fractions(x) else x

        try:
            return func(*args, **kwargs)
        except OF_THE_RUN:
            raise
        except RuntimeError:  # some functions with an index refuse values of another dtype
            cast_operands, cast_kwargs = pytree.tree_map(as_target, (operands, kwargs))
            return func(target, *cast_operands, **cast_kwargs)

    def _wide(self, x: Any) -> Any:
        """An argument in float64, if it is a floating-point tensor; the wider dtype, if it is a dtype or its name."""
        if isinstance(x, torch.dtype):
            return _WIDER.get(x, x)
        if isinstance(x, str):
            return "torch.DoubleTensor" if x in _NAMES else x
        if type(x) not in (Tensor, nn.Parameter) or x.dtype not in _WIDER or x.is_meta:
            return x
        return _perturbed_values(x) if is_parameter(x) and self._perturbed else x.to(_WIDER[x.dtype])


def _named(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """The keyword arguments with these names."""
    return {name: kwargs[name] for name in names if name in kwargs}


def _has_fractions(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _is_lookup(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function reads rows of a table, and gets no other floating-point tensor (weights of a bag's rows, say)."""
    if getattr(func, "__name__", "") not in _LOOKUPS:
        return False
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    return sum(map(_has_fractions, tensors)) < 2


def _rounded(x: Any) -> Any:
    """A tensor of float64 in float32; other values unchanged."""
    if type(x) not in (Tensor, nn.Parameter):
        return x
    if x.dtype is torch.float64:
        return x.float()
    return x.cfloat() if x.dtype is torch.complex128 else x


def _perturbed_values(p: Tensor) -> Tensor:
    """A parameter in float64 (or complex128), changed by at most a tenth of its root mean square plus 0.01. The change of an
    element depends on its position alone. So zeros and ones get other values, and equal rows become different."""
    x = p.to(_WIDER[p.dtype])
    size = 0.1 * x.detach().abs().square().mean().sqrt() + 0.01 if x.numel() else 0.0
    positions = torch.arange(x.numel(), dtype=torch.float64, device=x.device)
    return x + size * torch.sin(0.37 * positions * positions + 1.3 * positions + 0.7).view(x.shape)


def _is_narrow(x: Any) -> bool:
    """Whether ``x`` is a plain tensor that would be converted: it was there before the forward."""
    return type(x) is Tensor and x.dtype in _WIDER and x.layout is torch.strided and not x.is_meta


def _shares_memory(result: Any, x: Tensor) -> bool:
    """Whether all tensors of a result lie in the memory of ``x``."""
    tensors = pytree.tree_leaves(result)
    return all(type(t) is Tensor and storage_of(t) == storage_of(x) for t in tensors)
