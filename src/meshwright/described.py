"""The arguments of an op: its tensors; and all of them as something that can be compared, under which what it gives on meta
is kept. Many meta kernels are Python, and the blocks of a model ask the same again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.private import pytree


class Laid(NamedTuple):
    """All that counts of a plain tensor for what an op gives on meta."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format])


def laid(t: Tensor) -> Laid:
    return Laid(tuple(t.size()), t.stride(), t.dtype)


def described(x: Any) -> Any:
    """An argument as something that can be compared; with its type, as ``1 == 1.0 == True``. It may not be hashable."""
    kind = type(x)
    if kind in _PLAIN:  # most arguments
        return kind, x
    if isinstance(x, Tensor):
        return laid(x)
    if isinstance(x, dict):
        return dict, tuple((key, described(value)) for key, value in x.items())
    if kind in (list, tuple):
        return kind, tuple(map(described, x))
    return kind, None if isinstance(x, torch.Generator) else x


def made_again(x: Any, tensor: Callable[[Laid], Tensor] = Laid.on_meta) -> Any:
    """What `described` was given, its tensors made by ``tensor``."""
    if isinstance(x, Laid):
        return tensor(x)
    kind, value = x
    if kind is dict:
        return {key: made_again(inner, tensor) for key, inner in value}
    return kind(made_again(inner, tensor) for inner in value) if kind in (list, tuple) else value


def tensors_among(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among what an op takes or gives, which are in lists or tuples at most."""
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
    """The tensors in containers, as pytree finds them, in its order; what it takes for a leaf is not looked into."""
    tensors: list[Tensor] = []
    _look(value, tensors)
    return tensors


def _look(value: Any, tensors: list[Tensor]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        return
    if isinstance(value, Tensor):
        tensors.append(value)
    elif kind is tuple or kind is list:  # most calls: these three cost a tenth of what pytree does
        for item in value:
            _look(item, tensors)
    elif kind is dict:
        for item in value.values():
            _look(item, tensors)
    else:
        tensors += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their elements. (``Tensor.nbytes`` refuses sparse ones.)"""
    return sum(t.numel() * t.element_size() for t in tensors)
