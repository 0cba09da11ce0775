"""``moved_by``: bytes that an ATen function reads and writes.

| function | bytes | reason |
| --- | --- | --- |
| ``empty``, ``_unsafe_view`` | 0 | they allocate memory or make a view: no kernel runs |
| ``zeros``, ``full_like``, ``fill_`` | result | they read nothing |
| ``embedding``, ``index``, ``gather`` | 2 · result + indices | of the table, they read only the rows of the indices |
| ``all_gather_copy_in`` | 2 · input | FSDP2's function: copies a rank's share into the buffer |
| ``copy_`` | both tensors | it reads one and writes the other |
| any other | inputs + results | it reads each input once, and writes each result once |

An expanded tensor counts as many bytes as its storage has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.described import nbytes_of, tensors_among

ALLOCATES = frozenset("empty empty_like empty_strided new_empty new_empty_strided _unsafe_view _reshape_alias".split())
FILLS = frozenset(
    "zeros zeros_like new_zeros zero_ ones ones_like new_ones full full_like new_full fill_ arange scalar_tensor "
    "bernoulli_ uniform_ normal_ random_ exponential_".split()
)
LOOKS_UP = frozenset("embedding index index_select gather take take_along_dim".split())
OVERWRITES = frozenset(["copy_"])


def moved_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]) -> int:
    """Bytes that an ATen function reads and writes.

    Args:
        name: name of the function, without its namespace.
        args, kwargs: its arguments.
        results: the tensors that it returned.
    """
    if name in ALLOCATES:
        return 0
    if name in FILLS:
        return _nbytes(results)
    if name in LOOKS_UP:
        result_bytes, indices = _nbytes(results), [t for t in tensors_among(args[1:]) if not t.is_floating_point()]
        return 2 * result_bytes + _nbytes(indices)
    if name == "all_gather_copy_in":
        return 2 * _nbytes(tensors_among(args[:1]))
    inputs = tensors_among((*args, *kwargs.values()))
    if name in OVERWRITES:
        return _nbytes(inputs)  # the target and the source
    return _nbytes([*inputs, *results])


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of memory of tensors. An expanded tensor has fewer than its elements would need."""
    strided = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors if _strided(t))
    return strided + nbytes_of(t for t in tensors if not _strided(t))


def _strided(t: Tensor) -> bool:
    return t.layout is torch.strided
