"""``TensorTable``: facts that a function mode keeps on tensors, by their identity."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from meshwright.private import pytree

T = TypeVar("T")


class TensorTable(Generic[T]):
    """A dict from tensors to facts. It does not keep tensors alive. A new tensor with the id of a freed one has no entry."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], T]] = {}

    def note(self, tensors: Iterable[Any], fact: T) -> None:
        """Enters a fact for each tensor among ``tensors``; other values are skipped."""
        self._by_id |= {id(t): (weakref.ref(t), fact) for t in tensors if isinstance(t, Tensor)}

    def forget(self, t: Tensor) -> None:
        """Removes the entry of a tensor, if there is one."""
        self._by_id.pop(id(t), None)

    def of(self, t: Tensor) -> T | None:
        """The fact of a tensor; None if it has no entry."""
        reference, fact = self._by_id.get(id(t), (None, None))
        return fact if reference is not None and reference() is t else None

    def __contains__(self, t: Tensor) -> bool:
        return self.of(t) is not None

    def __bool__(self) -> bool:
        return bool(self._by_id)


def tensor_arguments(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of a torch function, including those in lists and tuples."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (t for t in pytree.tree_leaves(x) if isinstance(t, Tensor))


def is_parameter(t: Tensor) -> bool:
    """Whether a tensor is a parameter, or the local part of one."""
    return isinstance(t, nn.Parameter) or bool(
        getattr(t, "_mw_is_parameter", False) or getattr(t, "_mw_parameter", None)
    )
