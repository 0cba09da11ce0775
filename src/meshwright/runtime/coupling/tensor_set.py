"""``TensorSet``: tensors by identity, of which a function mode knows something."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from meshwright.private import pytree


class TensorSet:
    """Tensors by their id, and not kept alive: the next tensor may get the id of one that has ended, and is not in it."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """What is no tensor is left out."""
        self._by_id |= {id(t): weakref.ref(t) for t in tensors if isinstance(t, Tensor)}

    def discard(self, t: Tensor) -> None:
        """It need not be in it."""
        self._by_id.pop(id(t), None)

    def __contains__(self, t: Tensor) -> bool:
        reference = self._by_id.get(id(t))
        return reference is not None and reference() is t

    def __bool__(self) -> bool:
        return bool(self._by_id)


def tensors_given(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a torch function is given, those in lists and tuples too."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (t for t in pytree.tree_leaves(x) if isinstance(t, Tensor))


def is_parameter(t: Tensor) -> bool:
    """Whether a tensor is a parameter, or this rank's part of one."""
    return isinstance(t, nn.Parameter) or bool(
        getattr(t, "_mw_is_parameter", False) or getattr(t, "_mw_parameter", None)
    )
