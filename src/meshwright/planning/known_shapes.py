"""``KnownShapes``: what torch functions give on meta, each asked once for arguments that are described alike.

The blocks of a model ask the same again and again. To answer a function on meta takes torch several ops, many of which are
Python; to describe its arguments, and to make a tensor of a known shape, takes a tenth of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.described import Laid, described, laid, tensors_among
from meshwright.planning.assumed import to_meta
from meshwright.planning.meeting import Meeting
from meshwright.planning.shadow import Shadow, is_plain_meta
from meshwright.private import autocast_is_on, storage_of, without_dispatch
from meshwright.spmd.autograd_functions import transforming


@dataclass
class Asked:
    """What functions were asked for, which holds for every forward of a model.

    Attributes:
        known: a function and the description of its arguments → what it gives.
        others: functions that gave something else than a tensor of new memory: not asked after again.
    """

    known: dict[Any, Laid] = field(default_factory=dict)
    others: set[Any] = field(default_factory=set)


class KnownShapes(Meeting):
    """A ``Meeting`` that remembers what functions give.

    A function is remembered if all of its tensors are on meta, if no op that it came to did anything else than to give tensors
    (``Shadow.noted``), and if it gives one tensor, in memory that is none of its arguments'. What it gives then follows from
    the description of its arguments and torch's default type.

    Args:
        shadow: on for as long as this is.
        asked: what is known already, and gets the rest.
    """

    def __init__(self, shadow: Shadow, asked: Asked | None = None) -> None:
        super().__init__()
        self._shadow = shadow
        self._asked = asked if asked is not None else Asked()

    def met(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """See ``Meeting``."""
        if func in MASKED:
            args, kwargs = _without_mask_values(args, kwargs)
        if func in self._asked.others or torch.is_grad_enabled() or autocast_is_on() or transforming():
            return super().met(func, name, args, kwargs)
        arguments = (*args, *kwargs.values())
        tensors = tensors_among(arguments)
        if not tensors or not all(map(_is_described, arguments)):
            return super().met(func, name, args, kwargs)
        key = func, torch.get_default_dtype(), described(args), described(kwargs)
        if (known := self._asked.known.get(key)) is not None:
            # Shadow would take a factory that asks for meta for one that asked a parameter's device.
            with without_dispatch():
                made = known.on_meta()
            self._shadow.tell(tensors, (), made)
            return made
        noted = self._shadow.noted()
        result = super().met(func, name, args, kwargs)
        if self._shadow.noted() == noted and _is_fresh(result, tensors):
            self._asked.known[key] = laid(result)
        else:
            self._asked.others.add(func)
        return result


MASKED = frozenset([functional.scaled_dot_product_attention])
"""Functions that take a mask as they take their other tensors, and ask none of its values."""


def _without_mask_values(args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Arguments of which some tensor is on meta, with all of them there. A mask of the batch has values, one for each pair of
    positions, and such a function computes on them before they meet a tensor without values."""
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
    """Whether the description of an argument says all that there is to know of it."""
    kind = type(x)
    if kind in (list, tuple):
        return all(type(item) in _CONSTANTS or is_plain_meta(item) for item in x)
    return kind in _CONSTANTS or is_plain_meta(x)


def _is_fresh(result: Any, tensors: list[Tensor]) -> bool:
    """Whether a result is a tensor in memory that is none of the arguments', and that is as large as the tensor."""
    if not is_plain_meta(result) or storage_of(result) in set(map(storage_of, tensors)):
        return False
    with without_dispatch():
        like = laid(result).on_meta()
    return not result.storage_offset() and result.untyped_storage().nbytes() == like.untyped_storage().nbytes()


__all__ = ["Asked", "KnownShapes"]
