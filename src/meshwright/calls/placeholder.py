"""Placeholders: tensors that the model sees in place of a value that this rank does not have, or has in part.

    RemoteTensor    the value is on other ranks
    RowShard        a value of a branch whose data ranks have some rows each; ``rows`` are those of this rank

Both have the shape and dtype that the value has on one device, and no data. So whatever the model computes from shapes is the
same on every rank. A function that takes one is an event; the tracer replaces it by the value, if this rank has it.
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
    """A forward took another path than the recorded one."""


class Placeholder(Tensor):
    """Shape, strides and dtype of a value. Reading it outside the model's forward is an error."""

    _mw_value: tuple[Any, int]

    @staticmethod
    def __new__(cls: type[S], like: Tensor, tracer: Tracer, number: int, device: torch.device, *_: Any) -> S:
        strides = like.stride() if like.layout is torch.strided else None
        self = wrapper(cls, like, like.shape, strides=strides, device=device, requires_grad=like.requires_grad)
        tracer.name_value(self, number)
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
    """A value that is on other ranks."""


class RowShard(Placeholder):
    """A value of which this rank has some rows; or all rows, if they are too few to divide.

    Attributes:
        rows: a plain tensor with these rows.
    """

    def __init__(self, like: Tensor, tracer: Tracer, number: int, device: torch.device, rows: Tensor) -> None:
        self.rows = rows


_SIZED = frozenset(["view", "reshape", "expand"])


def sized(func: Any, args: tuple[Any, ...], rows: int, local_rows: int) -> tuple[Any, ...]:
    """The arguments of a function that takes a shape, with ``local_rows`` in place of a leading size ``rows``.

    With 8 rows of which this rank has 2, the arguments of ``x.view(8, -1)`` become those of ``x.view(2, -1)``.
    """
    if getattr(func, "__name__", "") not in _SIZED or len(args) < 2:
        return args
    x, first, *others = args
    if isinstance(first, (tuple, list)):
        return (x, (local_rows, *first[1:]), *others) if first and first[0] == rows else args
    return (x, local_rows, *others) if first == rows else args


def local_rows(t: Tensor) -> Tensor:
    """This rank's rows of a ``RowShard``; any other tensor itself."""
    return t.rows if isinstance(t, RowShard) else t


def wait_for(t: Tensor) -> None:
    """To be called before code outside the model reads a tensor: waits for it if it is still on its way."""
    tracer, number = _traced(t)
    if tracer is not None and number is not None:
        tracer.wait_for(number)


def place_of(t: Tensor) -> int | None:
    """The place in which a value was made; None for a tensor that is none."""
    tracer, number = _traced(t)
    return None if tracer is None or number is None else tracer.place_of(number)


def note_replaced(before: Tensor, now: Tensor) -> None:
    """Tells the tracer that code outside the model has replaced a tensor, and that the model goes on with the new one."""
    tracer, number = _traced(before)
    if tracer is not None and number is not None:
        tracer.replaced(number, now)


def note_replaced_within(before: Tensor, now: Tensor) -> None:
    """Tells the tracer that a module gets another tensor as its argument; outside the module the tensor is unchanged."""
    tracer, number = _traced(before)
    if tracer is not None and number is not None:
        tracer.replaced_within(number, now)


def _traced(t: Tensor) -> tuple[Tracer | None, int | None]:
    """(the tracer whose value a tensor is, the number of the value); None, None for any other tensor."""
    mark, number = getattr(t, "_mw_value", (None, None))
    return (None if mark is None else mark.tracer()), number


def _unavailable(func: Any, values: Any) -> RuntimeError:
    """The error if code outside the forward reads a placeholder."""
    placeholder = next(t for t in pytree.tree_leaves(values) if isinstance(t, Placeholder))
    mark, number = placeholder._mw_value
    name, tracer = label_of(func), mark.tracer()
    if isinstance(placeholder, RowShard):
        return PathError(f"{name} takes a tensor of which this rank has only some rows; read them as its .rows")
    if tracer is None:
        return PathError(f"{name} takes a tensor of a forward that has ended; its value lives on other ranks")
    return tracer.unavailable(number, name, "")
