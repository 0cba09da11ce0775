"""What is assumed of values that are not there: numbers, sizes, and shapes that torch does not know on meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
META = torch.device("meta")
_SEED = torch.empty(0, device=META)
INDEXED = (aten.index.Tensor, aten._unsafe_index.Tensor)


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def another(held: int, most: int) -> int:
    """Another number than a mask of ``most`` elements holds."""
    return held // 2 if held > 1 or held == most else min(2, most)


def of_another(mask: Tensor) -> Tensor:
    """A mask that holds another number of elements."""
    held, most = int(mask.count_nonzero()), mask.numel()
    order = mask.flatten().bool().to(torch.uint8).argsort(descending=True, stable=True)  # those that it holds first
    made = torch.zeros(most, dtype=torch.bool)
    made[order[: another(held, most)]] = True
    return made.view(mask.shape)


def to_meta(t: Tensor) -> Tensor:
    # From a meta tensor: a factory that asks for meta by name is taken for one that asked a parameter's device.
    return t if t.is_meta else _SEED.new_empty_strided(t.size(), t.stride(), dtype=t.dtype)


def _item(x: Tensor) -> Any:
    return {True: 1.0, False: 1}[x.is_floating_point()] if x.dtype != torch.bool else True


def _nonzero(held: Held, x: Tensor) -> Tensor:
    return torch.empty((held(x), x.dim()), dtype=torch.int64, device=META)


def _masked_select(held: Held, x: Tensor, mask: Tensor) -> Tensor:
    selected = held(mask.expand(torch.broadcast_shapes(x.shape, mask.shape)))
    return torch.empty(selected, dtype=x.dtype, device=META)


def _unique(held: Held, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = to_meta(x)
    return x.new_empty(held(x)), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(held(x), dtype=torch.int64)


def _unique_dim(held: Held, x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = to_meta(x)
    unique = held(x.new_empty(x.shape[dim]))
    shape = (*x.shape[:dim], unique, *x.shape[dim + 1 :])
    count = x.new_empty(unique, dtype=torch.int64)
    return x.new_empty(shape), x.new_empty(x.shape[dim], dtype=torch.int64), count


def _bincount(held: Held, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.empty(minlength or held(x), dtype=dtype, device=META)


Held = Callable[[Tensor], int]
SIZED: dict[Any, Any] = {  # what they give has a size that follows from values
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
}
READS = {  # as a person writes it
    aten._local_scalar_dense.default: "a number or a bool",
    aten.item.default: "a number or a bool",
    aten.is_nonzero.default: "a bool",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero, or a mask as an index",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}


def _ctc_loss(log_probs: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """A loss a row, and what only its backward reads."""
    rows = log_probs.shape[1:2]
    return torch.empty(rows, dtype=log_probs.dtype, device=META), torch.empty(0, dtype=log_probs.dtype, device=META)


# Functions that have no meta kernel in torch: their shapes.
NO_META: dict[Any, Any] = {aten._ctc_loss.Tensor: _ctc_loss, aten._ctc_loss.default: _ctc_loss}
# The other answers: to a question about a value of the batch, the opposite; of what has no value, nothing is true.
CONTRARY: dict[Any, Any] = {
    aten._local_scalar_dense.default: lambda func, x: False if x.is_meta else not func(x),
    aten.item.default: lambda func, x: False if x.is_meta else not func(x),
    aten.is_nonzero.default: lambda func, x: False if x.is_meta else not func(x),
    aten.nonzero.default: lambda func, x: x.new_empty((0, x.dim()), dtype=torch.int64),
}
