"""Assumptions for a forward on meta: the numbers that it reads, sizes that depend on values, and shapes that torch lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.planning.guards import raises_if
from meshwright.planning.loops import leaves_if
from meshwright.private import FakeTensor

aten = torch.ops.aten
META = torch.device("meta")
_SEED = torch.empty(0, device=META)
INDEXED = (aten.index.Tensor, aten._unsafe_index.Tensor)


def is_without_values(t: Tensor) -> bool:
    """Whether a tensor has a shape alone."""
    return t.is_meta or isinstance(t, FakeTensor)


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def another_count(count: int, size: int) -> int:
    """A count of selected elements that differs from ``count``, for a mask of ``size`` elements."""
    return count // 2 if count > 1 or count == size else min(2, size)


def of_another(mask: Tensor) -> Tensor:
    """A mask of the same shape that selects another number of elements."""
    count, size = int(mask.count_nonzero()), mask.numel()
    selected_first = mask.flatten().bool().to(torch.uint8).argsort(descending=True, stable=True)
    other = torch.zeros(size, dtype=torch.bool)
    other[selected_first[: another_count(count, size)]] = True
    return other.view(mask.shape)


def to_meta(t: Tensor) -> Tensor:
    # Made from a meta tensor: ``Shadow`` takes a factory with ``device="meta"`` for one that asked a parameter's device.
    return t if t.is_meta else _SEED.new_empty_strided(t.size(), t.stride(), dtype=t.dtype)


def _item(x: Tensor) -> Any:
    return {True: 1.0, False: 1}[x.is_floating_point()] if x.dtype != torch.bool else True


def _nonzero(count: Count, x: Tensor) -> Tensor:
    return torch.empty((count(x), x.dim()), dtype=torch.int64, device=META)


def _masked_select(count: Count, x: Tensor, mask: Tensor) -> Tensor:
    selected = count(mask.expand(torch.broadcast_shapes(x.shape, mask.shape)))
    return torch.empty(selected, dtype=x.dtype, device=META)


def _unique(count: Count, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = to_meta(x)
    return x.new_empty(count(x)), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(count(x), dtype=torch.int64)


def _unique_dim(count: Count, x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = to_meta(x)
    unique = count(x.new_empty(x.shape[dim]))
    shape = (*x.shape[:dim], unique, *x.shape[dim + 1 :])
    counts = x.new_empty(unique, dtype=torch.int64)
    return x.new_empty(shape), x.new_empty(x.shape[dim], dtype=torch.int64), counts


def _bincount(count: Count, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.empty(minlength or count(x), dtype=dtype, device=META)


Count = Callable[[Tensor], int]
SIZED: dict[Any, Any] = {  # functions whose results have a size that depends on values
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_dim,
    aten.bincount.default: _bincount,
}
ASSUMED: dict[Any, Any] = {
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.is_nonzero.default: lambda x: True,
    aten.equal.default: lambda x, y: True,
    aten.allclose.default: lambda x, y, *_, **__: True,
}
# (values of rows, their lengths, …): the lengths are on the host, wherever the values are. The size of the result follows.
LENGTHS = (aten._pack_padded_sequence.default,)
GIVES_BOOL = (aten.is_nonzero.default, aten.equal.default, aten.allclose.default)  # of tensors of any dtype
READS = {  # each function under the name that a person writes
    aten._local_scalar_dense.default: "a number or a bool",
    aten.item.default: "a number or a bool",
    aten.is_nonzero.default: "a bool",
    aten.equal.default: "equal",
    aten.allclose.default: "allclose",
    aten.nonzero.default: "nonzero, or a mask as an index",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}


def _ctc_loss(log_probs: Tensor, targets: Tensor, _: Any, lengths: Any, *__: Any, **___: Any) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the logarithms of the alphas, which the backward reads: (rows, time, 2 · longest target + 1).

    If the lengths have no values, the longest target is taken to fill the last dim of ``targets``.

    Args:
        log_probs: (time, rows, classes).
        targets: of each row, or of all in a row.
        lengths: of the targets of each row.
    """
    time, rows = log_probs.shape[:2]
    known = not isinstance(lengths, Tensor) or not is_without_values(lengths)
    longest = max(map(int, lengths), default=0) if known else targets.shape[-1]
    alphas = torch.empty((rows, time, 2 * longest + 1), dtype=log_probs.dtype, device=META)
    return torch.empty(rows, dtype=log_probs.dtype, device=META), alphas


# Functions that have no meta kernel in torch: their shapes.
NO_META: dict[Any, Any] = {aten._ctc_loss.Tensor: _ctc_loss, aten._ctc_loss.default: _ctc_loss}
# The opposite answers to reads of tensors with values, which follow from the batch; and no positions, of any tensor.
CONTRARY: dict[Any, Any] = {
    aten._local_scalar_dense.default: lambda func, x: not func(x),
    aten.item.default: lambda func, x: not func(x),
    aten.is_nonzero.default: lambda func, x: not func(x),
    aten.equal.default: lambda func, x, y: not func(x, y),
    aten.allclose.default: lambda func, x, y, *args, **kwargs: not func(x, y, *args, **kwargs),
    aten.nonzero.default: lambda func, x: x.new_empty((0, x.dim()), dtype=torch.int64),
}

_OTHER_NUMBERS = (0, 1000, -1000, 1_000_000, -1_000_000)


def assumed_answer(func: Any, args: Any, kwargs: dict[str, Any], another: int = 0) -> Any:
    """The assumed answer to a read: a number is one; a bool is true, or false if the model raises an error then, or leaves a
    loop.

    Args:
        another: if it is not 0, the number of another answer to give, which ends a loop sooner or later (see ``Loops``).
    """
    answer = ASSUMED[func](*args, **kwargs)
    if not isinstance(answer, bool):
        return type(answer)(_OTHER_NUMBERS[(another - 1) % len(_OTHER_NUMBERS)]) if another else answer
    answer = leaves_if(True) if another else not leaves_if(True)
    return not answer if raises_if(answer) else answer
