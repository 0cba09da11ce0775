"""``KnownShapes``: a cache of torch functions' results on meta, by the function and a description of its arguments.

The blocks of a model call the same functions with equal shapes. On meta, torch runs several ops for a function, many of them
in Python. Describing the arguments and making a tensor of a known shape takes a tenth of that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.described import TensorMeta, described, tensor_meta, tensors_among
from meshwright.planning.assumed import to_meta
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.shadow import Shadow, is_plain_meta
from meshwright.private import autocast_is_on, storage_of, without_dispatch
from meshwright.spmd.autograd_functions import transforming


@dataclass
class ShapeEntries:
    """The entries of the cache. They hold for every forward of a model, so several ``KnownShapes`` may share them.

    Attributes:
        known: (function, default dtype, description of its arguments) → its result.
        others: functions that returned something else than a tensor in new memory. They are not cached.
    """

    known: dict[Any, TensorMeta] = field(default_factory=dict)
    others: set[Any] = field(default_factory=set)


class KnownShapes(MetaFunctions):
    """``MetaFunctions`` with a cache of the functions' results.

    A result is cached if all tensor arguments are on meta, if no op within the function did anything but return tensors
    (``Shadow.noted``), and if the function returns one tensor that shares no memory with its arguments. The result then
    depends only on the description of the arguments and on torch's default dtype.

    Args:
        shadow: the mode below this one, entered before it and left after it.
        asked: a cache to use and to fill; a new one if None.
    """

    def __init__(self, shadow: Shadow, asked: ShapeEntries | None = None) -> None:
        super().__init__()
        self._shadow = shadow
        self._asked = asked if asked is not None else ShapeEntries()

    def call_function(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """See ``MetaFunctions``."""
        if func in MASKED:
            args, kwargs = _without_mask_values(args, kwargs)
        if func in self._asked.others or torch.is_grad_enabled() or autocast_is_on() or transforming():
            return super().call_function(func, name, args, kwargs)
        arguments = (*args, *kwargs.values())
        tensors = tensors_among(arguments)
        if not tensors or not all(map(_is_described, arguments)):
            return super().call_function(func, name, args, kwargs)
        key = func, torch.get_default_dtype(), described(args), described(kwargs)
        if (known := self._asked.known.get(key)) is not None:
            # Shadow would take a factory with ``device="meta"`` for one that asked a parameter's device.
            with without_dispatch():
                cached = known.on_meta()
            self._shadow.tell(tensors, (), cached)
            return cached
        noted = self._shadow.noted()
        result = super().call_function(func, name, args, kwargs)
        if self._shadow.noted() == noted and _is_fresh(result, tensors):
            self._asked.known[key] = tensor_meta(result)
        else:
            self._asked.others.add(func)
        return result


MASKED = frozenset([functional.scaled_dot_product_attention])
"""Functions with a mask among their arguments whose result on meta does not depend on the mask's values."""


def _without_mask_values(args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """The arguments with all tensors moved to meta, if any of them is on meta; else the arguments unchanged.

    A mask of the batch has a value for each pair of positions. The function would compute on these values before it meets a
    tensor without values.
    """
    if any(t.is_meta for t in tensors_among((*args, *kwargs.values()))):
        with without_dispatch():
            return tuple(map(_on_meta, args)), {name: _on_meta(value) for name, value in kwargs.items()}
    return args, kwargs


def _on_meta(x: Any) -> Any:
    return to_meta(x) if isinstance(x, Tensor) and not x.is_meta else x


_CONSTANTS = frozenset(
    [int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size]
)


def _is_described(x: Any) -> bool:
    """Whether ``described(x)`` holds every fact of an argument on which a result on meta can depend."""
    kind = type(x)
    if kind in (list, tuple):
        return all(type(item) in _CONSTANTS or is_plain_meta(item) for item in x)
    return kind in _CONSTANTS or is_plain_meta(x)


def _is_fresh(result: Any, tensors: list[Tensor]) -> bool:
    """Whether a result is a tensor that shares no memory with the arguments and whose storage is exactly as large as itself."""
    if not is_plain_meta(result) or storage_of(result) in set(map(storage_of, tensors)):
        return False
    with without_dispatch():
        like = tensor_meta(result).on_meta()
    return not result.storage_offset() and result.untyped_storage().nbytes() == like.untyped_storage().nbytes()


__all__ = ["KnownShapes", "ShapeEntries"]
