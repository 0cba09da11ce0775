"""What stands for a value in the model's hands where the value itself is not, or not whole; and what may be asked of it.

    RemoteTensor    other ranks have it
    RowShard        a branch made it, of which each data rank has some rows: this rank its ``rows``

Both have the shape and type that the value has on one device, and nothing else: what the model makes of its shape is the
same on every rank. A function that takes one is an event of the walk, which puts the value in its place, where it is here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.calls.tracer import Tracer
from meshwright.private import pytree, without_subclasses, wrapper
from meshwright.spmd.torch_functions import is_fact, label_of

S = TypeVar("S", bound="Placeholder")


class PathError(RuntimeError):
    """A forward that did not do what the recorded one did."""


class Placeholder(Tensor):
    """Shape, strides and type of a value; an error for whoever reads it outside the model's forward."""

    _mw_value: tuple[Any, int]

    @staticmethod
    def __new__(cls: type[S], like: Tensor, walk: Tracer, number: int, device: torch.device, *_: Any) -> S:
        strides = like.stride() if like.layout is torch.strided else None
        self = wrapper(cls, like, like.shape, strides=strides, device=device, requires_grad=like.requires_grad)
        walk.name_value(self, number)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_fact(func) or func is Tensor.__deepcopy__:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        raise _unavailable(func, (args, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise _unavailable(func, (args, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self: S, memo: Any) -> S:
        return self


class RemoteTensor(Placeholder):
    """A value that other ranks have."""


class RowShard(Placeholder):
    """A value of which this rank has some rows, or as many as there are if they are too few to divide.

    Attributes:
        rows: those, a tensor like any other.
    """

    def __init__(self, like: Tensor, walk: Tracer, number: int, device: torch.device, rows: Tensor) -> None:
        self.rows = rows


_SIZED = frozenset(["view", "reshape", "expand"])


def sized(func: Any, args: tuple[Any, ...], rows: int, local_rows: int) -> tuple[Any, ...]:
    """The arguments of a function that takes a shape, ``rows`` long, as it is of ``local_rows`` of them: ``x.view(8, -1)``."""
    if getattr(func, "__name__", "") not in _SIZED or len(args) < 2:
        return args
    x, first, *others = args
    if isinstance(first, (tuple, list)):
        return (x, (local_rows, *first[1:]), *others) if first and first[0] == rows else args
    return (x, local_rows, *others) if first == rows else args


def held(t: Tensor) -> Tensor:
    """What this rank has of a value: its rows, where it has some; else the tensor itself."""
    return t.rows if isinstance(t, RowShard) else t


def arrived(t: Tensor) -> None:
    """Something outside the model reads a tensor: waits for it where it is on its way."""
    walk, number = _known(t)
    if walk is not None and number is not None:
        walk.arrived(number)


def replaced(before: Tensor, now: Tensor) -> None:
    """Something outside the model has put a tensor in place of another, which the model goes on with."""
    walk, number = _known(before)
    if walk is not None and number is not None:
        walk.replaced(number, now)


def handed(before: Tensor, now: Tensor) -> None:
    """Something outside the model hands a module a tensor in place of another, which stays what it is around the module."""
    walk, number = _known(before)
    if walk is not None and number is not None:
        walk.handed(number, now)


def _known(t: Tensor) -> tuple[Tracer | None, int | None]:
    mark, number = getattr(t, "_mw_value", (None, None))
    return (None if mark is None else mark.walk()), number


def _unavailable(func: Any, values: Any) -> RuntimeError:
    placeholder = next(t for t in pytree.tree_leaves(values) if isinstance(t, Placeholder))
    mark, number = placeholder._mw_value
    name, walk = label_of(func), mark.walk()
    if isinstance(placeholder, RowShard):
        return PathError(f"{name} takes a tensor of which this rank has some rows alone; they are its .rows")
    if walk is None:
        return PathError(f"{name} takes a tensor of a forward that has ended; its value lives on other ranks")
    return walk.unavailable(number, name, "")
