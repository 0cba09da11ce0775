"""``MetaFunctions``: a function mode above ``Shadow``, for functions that fail before the dispatcher if tensors are on meta."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from meshwright.described import tensors_within
from meshwright.planning.assumed import META, to_meta
from meshwright.planning.origins import Origins
from meshwright.private import autocast_is_on, python_body, pytree, without_any_mode
from meshwright.spmd.autograd_functions import FunctionMode, transforming
from meshwright.spmd.torch_functions import FACTS

_DEVICE = Tensor.device.__get__


def gradients_without_values(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """Stands for ``torch.autograd.grad`` in a forward on meta: returns tensors with the shapes of the gradients."""
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    gradients = (torch.empty_like(to_meta(x), requires_grad=False) for x in inputs)
    if not create_graph or transforming():  # a transform of torch.func tracks its gradients itself
        return tuple(gradients)
    return tuple(x.requires_grad_().clone() if x.is_floating_point() else x for x in gradients)


def _autocast_types() -> tuple[tuple[str, torch.dtype], ...]:
    """(device type, dtype) for each device type for which autocast is on."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def _device() -> torch.device:
    """A device on which autocast casts as on the model's. The CPU stands in if autocast is on for CUDA and there is no GPU."""
    return torch.device("cuda" if torch.is_autocast_enabled("cuda") and torch.cuda.is_available() else "cpu")


def _on_a_device() -> AbstractContextManager[Any]:
    return torch.autocast(_device().type, dtype=_autocast_types()[-1][1])


_READ_AS_ONES = frozenset([Tensor.tolist, Tensor.numpy])
_READ_PAST = _READ_AS_ONES | {Tensor.__array__, Tensor.__dlpack__}  # the dispatcher
# What ``MetaFunctions`` may answer itself.
_ANSWERED = _READ_PAST | {
    _DEVICE,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.type,
    Tensor.__format__,
    torch.autograd.grad,
    torch.istft,
    Tensor.istft,
}


def _istft(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands for ``torch.istft`` on meta. Torch reads whether the windows leave out a position, which has no answer there.

    The length of the result is that of one row of ones with a window of ones.
    """
    row = torch.ones(x.shape[-2:], dtype=x.dtype)
    with without_any_mode():
        ones = partial(pytree.tree_map_only, Tensor, lambda t: torch.ones(t.shape, dtype=t.dtype))
        result = torch.istft(row, *ones(args), **ones(kwargs))
    total = sum((to_meta(t).sum() for t in tensors_within((args, kwargs))), x.sum((-2, -1)))
    total = total if result.is_complex() else total.real
    return total[..., None].expand(*total.shape, *result.shape).clone()


def _type(x: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """``Tensor.type`` for a tensor on meta: takes and returns the names for tensors on the CPU (``torch.DoubleTensor``)."""
    if dtype is None:
        return x.type().replace("torch.meta.", "torch.")
    if isinstance(dtype, str):
        dtype = torch.empty(0).type(f"torch.{dtype.rpartition('.')[2]}").dtype
    return x.type(dtype)


class MetaFunctions(FunctionMode):
    """Runs torch functions on tensors on meta, also together with tensors of the batch.

    ``Shadow`` does this for ATen ops, but some calls do not reach it with both kinds of tensors. RNNs, ``cdist`` and attention
    compare devices first: if such a function refuses, it is called again with all tensors on meta. ``tolist`` and ``numpy``
    read values without the dispatcher: a tensor on meta answers with ones.

    Args:
        origins: gets the memory on which the answers depend.

    Attributes:
        known: how many times ``tolist`` or ``numpy`` read a tensor of the batch.
        differentiates: whether the forward asked for gradients itself.
    """

    def __init__(self, origins: Origins | None = None) -> None:
        super().__init__()
        self._origins = origins
        self.known, self.differentiates = 0, False
        # Function and dtypes of its arguments → its result's dtype under autocast.
        self._types: dict[Any, torch.dtype] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.differentiates |= transforming()
        if func in _ANSWERED and (answer := self._answered(func, args, kwargs)) is not NotImplemented:
            return answer
        if func in FACTS:  # most calls
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if autocast_is_on() and _autocast_types():
            tensors = tensors_within((args, kwargs))
            if META in {t.device for t in tensors}:
                return self._autocast(func, name, args, kwargs)
        return self.call_function(func, name, args, kwargs)

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The result of a function of ``_ANSWERED`` for a tensor without values; NotImplemented if torch is to answer."""
        if func is torch.autograd.grad:
            if not any(isinstance(t, Tensor) and t.is_meta for t in pytree.tree_leaves(args)):
                return NotImplemented
            self.differentiates = True
            return gradients_without_values(*args, **kwargs)
        x = args[0]
        if func in _READ_PAST:
            self.known += func in _READ_AS_ONES and not x.is_meta
            if self._origins is not None:
                self._origins.look(args[:1])
            return func(torch.ones(x.shape, dtype=x.dtype)) if func in _READ_AS_ONES and x.is_meta else NotImplemented
        if not x.is_meta:
            return NotImplemented
        # Tensors that the model makes on this device are real, and ``torch.autocast(x.device.type)`` works.
        if func == _DEVICE:
            return torch.device("cpu")
        if func is Tensor.type:
            return _type(*args, **kwargs)
        if func in (torch.istft, Tensor.istft):
            return _istft(*args, **kwargs)
        if func is Tensor.__format__:  # a number in a text, for example in a module's name
            return NotImplemented if x.dim() else format(x.item(), *args[1:])
        return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None  # no backward follows

    def _autocast(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a function under autocast, which ignores tensors on meta, and casts the result to the dtype it has on a device.

        A function written in Python runs as its body under this mode, so that each function within is cast by its own rule.
        """
        written_in_python = getattr(func, "__module__", "") in ("torch.nn.functional", "torch.functional")
        if written_in_python and (body := python_body(func)) is not None:
            with self:
                return body(*args, **kwargs)
        result = self.call_function(func, name, args, kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point() or "out" in kwargs or name.endswith("_"):
            return result
        dtype = self._type_under_autocast(func, args, kwargs)
        return result if dtype is None or dtype == result.dtype else result.to(dtype)

    def _type_under_autocast(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.dtype | None:
        """The dtype of a function's result under autocast, found by calling it with small tensors on a device.

        None if the function fails on every set of small tensors. The key holds which dims have one element, because with those
        a function may compute in another way and dtype (``einsum``).
        """
        tensors = tensors_within((args, kwargs))
        key = func, tuple((t.dtype, *(n == 1 for n in t.shape)) for t in tensors), _autocast_types()
        tensors_only = tuple(t for t in args if isinstance(t, Tensor))  # without constants such as a number of groups
        trials: list[tuple[tuple[Any, Any], int]] = [((args, kwargs), 2), ((args, kwargs), 1), ((tensors_only, {}), 1)]
        for arguments, largest in trials if key not in self._types else ():
            with (
                suppress(Exception),
                without_any_mode(),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                _on_a_device(),
            ):
                inputs, named = pytree.tree_map_only(Tensor, partial(_small, largest), arguments)
                self._types[key] = func(*inputs, **named).dtype
                break
        return self._types.get(key)

    def call_function(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Calls a function; if it refuses tensors of two devices, calls it again with all tensors on meta."""
        if name in ("_grouped_mm", "grouped_mm") and args[0].is_meta:  # its meta kernel insists on bfloat16
            args, kwargs = pytree.tree_map_only(Tensor, _half, (args, kwargs))
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            devices = {t.device for t in tensors_within((args, kwargs))}
            if META not in devices or len(devices) == 1:
                raise
        args, kwargs = pytree.tree_map_only(Tensor, to_meta, (args, kwargs))
        return func(*args, **kwargs)


def _small(largest: int, t: Tensor) -> Tensor:
    """Zeros on a device with the dtype and dims of ``t``, with at most ``largest`` elements in each dim."""
    return t.new_zeros([min(n, largest) for n in t.shape], device=_device())


def _half(t: Tensor) -> Tensor:
    t = to_meta(t)
    return t.to(torch.bfloat16) if t.is_floating_point() else t
