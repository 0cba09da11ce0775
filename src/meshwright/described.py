"""The arguments of an op: its tensors; and all of them as something that can be compared, under which what it gives on meta
is kept. Many meta kernels are Python, and the blocks of a model ask the same again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Laid(NamedTuple):
    """All that counts of a plain tensor for what an op gives on meta."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def laid(t: Tensor) -> Laid:
    return Laid(tuple(t.size()), t.stride(), t.dtype)


def described(x: Any) -> Any:
    """An argument as something that can be compared; with its type, as ``1 == 1.0 == True``. It may not be hashable."""
    if isinstance(x, Tensor):
        return laid(x)
    if isinstance(x, dict):
        return dict, tuple((key, described(value)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x), tuple(map(described, x))
    return type(x), None if isinstance(x, torch.Generator) else x


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
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += [t for t in x if isinstance(t, Tensor)]
    return tensors


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their elements. (``Tensor.nbytes`` refuses sparse ones.)"""
    return sum(t.numel() * t.element_size() for t in tensors)
