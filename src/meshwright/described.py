"""The arguments of an op: the tensors among them; and a description of them that can be compared, a key for caches.

Results on meta are cached under it: many meta kernels are Python, and the blocks of a model call them with equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.private import pytree


class TensorMeta(NamedTuple):
    """The facts of a plain tensor on which the result of an op on meta depends."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format])


def tensor_meta(t: Tensor) -> TensorMeta:
    return TensorMeta(tuple(t.size()), t.stride(), t.dtype)


def described(x: Any) -> Any:
    """A description of an argument that can be compared. It contains the type, as ``1 == 1.0 == True``. It may not be
    hashable."""
    kind = type(x)
    if kind in _PLAIN:  # most arguments
        return kind, x
    if isinstance(x, Tensor):
        return tensor_meta(x)
    if isinstance(x, dict):
        return dict, tuple((key, described(value)) for key, value in x.items())
    if kind in (list, tuple):
        return kind, tuple(map(described, x))
    return kind, None if isinstance(x, torch.Generator) else x


def from_description(x: Any, tensor: Callable[[TensorMeta], Tensor] = TensorMeta.on_meta) -> Any:
    """The argument for a description; ``tensor`` makes its tensors. The inverse of `described`."""
    if isinstance(x, TensorMeta):
        return tensor(x)
    kind, value = x
    if kind is dict:
        return {key: from_description(inner, tensor) for key, inner in value}
    return kind(from_description(inner, tensor) for inner in value) if kind in (list, tuple) else value


def tensors_among(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results of an op, which may be in lists or tuples."""
    tensors: list[Tensor] = []
    for x in arguments:
        if type(x) in _PLAIN:
            continue
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += [t for t in x if isinstance(t, Tensor)]
    return tensors


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors in containers, in the order of pytree. Objects that are leaves to pytree are not looked into."""
    tensors: list[Tensor] = []
    _look(value, tensors)
    return tensors


def map_within(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``fn(t)`` in place of each tensor t in containers, in the order of ``tensors_within``."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return fn(value)
    if kind is tuple or kind is list:  # most calls: these branches take a tenth of pytree's time
        return kind([map_within(fn, item) for item in value])
    if kind is dict:
        return {key: map_within(fn, item) for key, item in value.items()}
    return pytree.tree_map_only(Tensor, fn, value)


def _look(value: Any, tensors: list[Tensor]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        return
    if isinstance(value, Tensor):
        tensors.append(value)
    elif kind is tuple or kind is list:  # most calls: these branches take a tenth of pytree's time
        for item in value:
            _look(item, tensors)
    elif kind is dict:
        for item in value.values():
            _look(item, tensors)
    else:
        tensors += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the elements of tensors. (``Tensor.nbytes`` refuses sparse ones.)"""
    return sum(t.numel() * t.element_size() for t in tensors)


_SPARSE = frozenset([torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])


def is_sparse(t: Tensor) -> bool:
    """Whether a tensor has a sparse layout, of whatever kind. (``Tensor.is_sparse`` is that of COO alone.)"""
    return t.layout in _SPARSE


def dense(t: Tensor) -> Tensor:
    """The tensor itself; for a sparse one, a dense copy."""
    return t.to_dense() if is_sparse(t) else t


Layout = tuple[torch.layout, tuple[int, ...]]
"""A layout of torch; and the sizes of its blocks, if it has blocks."""


def layout_of(t: Tensor) -> Layout:
    in_blocks = t.layout in (torch.sparse_bsr, torch.sparse_bsc)
    return t.layout, tuple(t.values().shape[-2:]) if in_blocks else ()


def in_layout(layout: Layout, t: Tensor) -> Tensor:
    """A dense tensor in a layout: itself, or a sparse copy of it."""
    kind, blocks = layout
    return t.to_sparse(layout=kind, blocksize=blocks or None) if kind in _SPARSE else t
