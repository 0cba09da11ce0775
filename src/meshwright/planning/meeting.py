"""``Meeting``: a ``Shadow`` at the level of torch functions: tensors of the batch and tensors without values in one call."""

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
    """What ``torch.autograd.grad`` gives, for its shapes: a gradient asked for within a forward."""
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    made = (torch.empty_like(to_meta(x), requires_grad=False) for x in inputs)
    if not create_graph or transforming():  # (a transform's own gradients are told apart by it)
        return tuple(made)
    return tuple(x.requires_grad_().clone() if x.is_floating_point() else x for x in made)


def _autocast_types() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices for which autocast is on, and its types."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def _device() -> torch.device:
    """One on which autocast does what it does on the model's: where it is on for CUDA without CUDA, the CPU must do."""
    return torch.device("cuda" if torch.is_autocast_enabled("cuda") and torch.cuda.is_available() else "cpu")


def _on_a_device() -> AbstractContextManager[Any]:
    return torch.autocast(_device().type, dtype=_autocast_types()[-1][1])


_READ_AS_ONES = frozenset([Tensor.tolist, Tensor.numpy])
_READ_PAST = _READ_AS_ONES | {Tensor.__array__, Tensor.__dlpack__}  # the dispatcher
# What ``Meeting`` may answer itself.
_ANSWERED = _READ_PAST | {
    _DEVICE,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.type,
    Tensor.__format__,
    torch.autograd.grad,
}


def _type(x: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """``Tensor.type``, which has names for types of a device (``torch.DoubleTensor``) and none for those of meta."""
    if dtype is None:
        return x.type().replace("torch.meta.", "torch.")
    if isinstance(dtype, str):
        dtype = torch.empty(0).type(f"torch.{dtype.rpartition('.')[2]}").dtype
    return x.type(dtype)


class Meeting(FunctionMode):
    """The same at the level of torch functions, for what never reaches the dispatcher with both kinds.

    Some functions compare devices first (RNNs, ``cdist``, attention): what such a function refuses, it is asked again with
    all of its tensors on meta. And ``tolist`` and ``numpy`` read past the dispatcher.

    Args:
        origins: gets the memory that the answers follow from.

    Attributes:
        differentiates: whether the forward asked for gradients itself.
    """

    def __init__(self, origins: Origins | None = None) -> None:
        super().__init__()
        self._origins = origins
        self.known, self.differentiates = 0, False
        self._types: dict[Any, torch.dtype] = {}  # of what functions give under autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.differentiates |= transforming()
        if func in _ANSWERED and (answer := self._answered(func, args, kwargs)) is not NotImplemented:
            return answer
        if func in FACTS:  # most of what is asked
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if autocast_is_on() and _autocast_types():
            tensors = tensors_within((args, kwargs))
            if META in {t.device for t in tensors}:
                return self._autocast(func, name, args, kwargs)
        return self.met(func, name, args, kwargs)

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What is asked of a tensor without values, or past the dispatcher; NotImplemented where torch is to answer."""
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
        if func == _DEVICE:  # what a model makes there, or asks of it (``torch.autocast(x.device.type)``), is real
            return torch.device("cpu")
        if func is Tensor.type:
            return _type(*args, **kwargs)
        if func is Tensor.__format__:  # a number in a text: in the name of a module, say
            return NotImplemented if x.dim() else format(x.item(), *args[1:])
        return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None  # no backward follows

    def _autocast(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Under autocast, which has nothing for tensors on meta: in the type that it gives on a device.

        A function that is written in Python has functions within that have types of their own.
        """
        written_in_python = getattr(func, "__module__", "") in ("torch.nn.functional", "torch.functional")
        if written_in_python and (body := python_body(func)) is not None:
            with self:
                return body(*args, **kwargs)
        result = self.met(func, name, args, kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point() or "out" in kwargs or name.endswith("_"):
            return result
        dtype = self._type_under_autocast(func, args, kwargs)
        return result if dtype is None or dtype == result.dtype else result.to(dtype)

    def _type_under_autocast(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.dtype | None:
        """Asked of torch itself, with small tensors; None if the function takes none such. What has one element in a dim may be
        computed in another way, and type (``einsum``)."""
        tensors = tensors_within((args, kwargs))
        key = func, tuple((t.dtype, *(n == 1 for n in t.shape)) for t in tensors), _autocast_types()
        alone = tuple(t for t in args if isinstance(t, Tensor))  # without how many groups of channels there are, say
        ways: list[tuple[tuple[Any, Any], int]] = [((args, kwargs), 2), ((args, kwargs), 1), ((alone, {}), 1)]
        for way, most in ways if key not in self._types else ():
            with (
                suppress(Exception),
                without_any_mode(),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                _on_a_device(),
            ):
                inputs, named = pytree.tree_map_only(Tensor, partial(_small, most), way)
                self._types[key] = func(*inputs, **named).dtype
                break
        return self._types.get(key)

    def met(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What a function gives, where tensors of both kinds may meet."""
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


def _small(most: int, t: Tensor) -> Tensor:
    """A tensor like another on a device, of at most so many elements a dim."""
    return t.new_zeros([min(n, most) for n in t.shape], device=_device())


def _half(t: Tensor) -> Tensor:
    t = to_meta(t)
    return t.to(torch.bfloat16) if t.is_floating_point() else t
