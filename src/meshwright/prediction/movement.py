"""Bytes that a function of ATen reads and writes.

| function | bytes | why |
| --- | --- | --- |
| ``empty``, ``_unsafe_view`` | 0 | memory is handed out, or seen otherwise: no kernel runs |
| ``zeros``, ``full_like``, ``fill_`` | what is written | what is there is not read |
| ``embedding``, ``index``, ``gather`` | 2 · result + indices | of the table, the rows that are asked for |
| ``all_gather_copy_in`` | 2 · what is put in | FSDP2's own: a rank's share goes to its place in the buffer |
| any other | all that it is given + all that it gives | each is read or written once |

A tensor that is expanded counts as the memory that it has.
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
    """Bytes that a function reads and writes.

    Args:
        name: of the function, without its namespace.
        results: the tensors that it returned.
    """
    if name in ALLOCATES:
        return 0
    if name in FILLS:
        return _nbytes(results)
    if name in LOOKS_UP:
        rows, indices = _nbytes(results), [t for t in tensors_among(args[1:]) if not t.is_floating_point()]
        return 2 * rows + _nbytes(indices)
    if name == "all_gather_copy_in":
        return 2 * _nbytes(tensors_among(args[:1]))
    taken = tensors_among((*args, *kwargs.values()))
    if name in OVERWRITES:
        return _nbytes(taken)  # what is written, and what it is written from
    return _nbytes([*taken, *results])


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of memory: of a tensor that is expanded, fewer than of its elements."""
    strided = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors if _strided(t))
    return strided + nbytes_of(t for t in tensors if not _strided(t))


def _strided(t: Tensor) -> bool:
    return t.layout is torch.strided
