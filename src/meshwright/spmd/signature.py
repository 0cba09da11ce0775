"""The signature of a call: everything that a decision about the call may depend on.

    the torch function; whether autocast is on, and to which types it casts
    for each tensor its ``Spec``: layout, shape, dtype, device, and its strides, on one device and on this rank
    the constants: numbers, sizes, slices, types …, alone and in lists

A signature never contains a value of a tensor. Calls with the same signature share one decision, which ``Dispatcher`` keeps.
A call is decided anew each time if a constant has no hash, or if a tensor knows more than its Spec says
(see ``tensor.spec_of``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import REPLICATE, Layout
from meshwright.private import autocast_is_on
from meshwright.spmd.tensor import GlobalTensor, Spec


@dataclass(frozen=True)
class Undecided:
    """Planning only: the layout of a parameter that is not decided yet. Every rank holds the whole parameter."""

    def __str__(self) -> str:
        return "undecided"


UNDECIDED = Undecided()


class Operand:
    """A tensor among the arguments of a call, as a decider sees it.

    Attributes:
        index: its number among the tensors of the call.
        layout: the layout over the axis; ``REPLICATE`` for a tensor that is not a ``GlobalTensor``.
        parameter: whether it is a parameter of the model.
    """

    __slots__ = ("device", "dtype", "index", "layout", "parameter", "shape", "spec")

    def __init__(self, index: int, spec: Spec) -> None:
        self.index, self.spec = index, spec
        self.shape, self.dtype, self.device, self.parameter = spec.shape, spec.dtype, spec.device, spec.parameter
        self.layout: Layout | Undecided = UNDECIDED if spec.parameter and spec.layout == REPLICATE else spec.layout

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Call:
    """A call to be decided, with Operands in place of tensors.

    Attributes:
        rank: this rank's coordinate on the axis.
        ranks: the size of the axis.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", "")

    @property
    def operands(self) -> list[Operand]:
        """The tensors that are arguments themselves; those within lists are left out."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Operand)]


def layout_of(x: Any) -> Any:
    """The layout of an operand; ``REPLICATE`` for anything that is not an operand."""
    return x.layout if isinstance(x, Operand) else REPLICATE


def is_undecided(x: Any) -> bool:
    return isinstance(x, Operand) and x.layout is UNDECIDED


class ReadsValue(Exception):
    """The decision depends on a number that is a tensor: decide again, with the number in its place."""


def as_number(x: Any) -> int:
    """A size or an index as a number; raises ``ReadsValue`` for a tensor."""
    if isinstance(x, Operand):
        raise ReadsValue
    return int(x)


def passed_on(value: Any) -> list[Operand]:
    """The operands that a decider left among its constants, because it did not expect tensors there."""
    operands: list[Operand] = []
    replaced(value, lambda x: operands.append(x) if isinstance(x, Operand) else None)
    return operands


def with_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call, with a number in place of each tensor that is one integer; the first argument is unchanged."""
    return (*args[:1], *replaced(args[1:], _value)), replaced(kwargs, _value)


def _value(x: Any) -> Any:
    return int(x) if isinstance(x, Tensor) and is_number(x) else x


def is_number(x: Tensor | Operand) -> bool:
    """Whether a tensor is one integer."""
    return not x.dim() and not x.dtype.is_floating_point and x.dtype != torch.bool


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to every leaf of its nested tuples, lists, dicts and slices."""
    kind = type(value)
    if kind is tuple or kind is torch.Size:
        return tuple([replaced(v, change) for v in value])
    if kind is list:
        return [replaced(v, change) for v in value]
    if kind is dict:
        return {k: replaced(v, change) for k, v in value.items()}
    if kind is slice:
        return slice(*(replaced(v, change) for v in (value.start, value.stop, value.step)))
    return change(value)


# --- the key ----------------------------------------------------------------------------------------------------------

# Types of constants that are interchangeable if their type and their value are equal.
_CONSTANTS = frozenset(
    [bool, str, complex, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format]
)


class _Never:
    """A part of a key that equals nothing, not even itself: a call with this part is decided anew each time."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


NEVER = _Never()
_NUMBERS, _MANY, _STRIDED = frozenset([int, float, bool]), 64, torch.strided
Local = Callable[[Tensor], "Tensor | None"]


def read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], local: Local | None) -> tuple[Any, Any, Any]:
    """(dispatcher of the first global tensor or None, the parts of the signature, the tensors of the call).

    Args:
        local: a parameter → its local part, which replaces it in the call; another tensor → None.
    """
    dispatcher: Any = None
    parts: list[Any] = [func, _autocast()] if autocast_is_on() else [func]
    tensors: list[Tensor] = []
    for x in args:
        kind = type(x)
        if kind is GlobalTensor:
            parts.append(x._mw_spec)
            tensors.append(x)
            if dispatcher is None:
                dispatcher = x._mw_dispatcher
        elif kind is int:
            parts.append(x)
        elif kind is Tensor:
            _read_plain(x, parts)
            tensors.append(x)
        elif kind is tuple and len(x) <= _MANY:
            for y in x:
                if type(y) is not int:
                    dispatcher = _read_several(x, kind, parts, tensors, local, dispatcher)
                    break
            else:  # sizes, most often
                parts.append(x)
        else:
            dispatcher = _read(x, kind, parts, tensors, local, dispatcher)
    if kwargs:
        for name, x in kwargs.items():
            parts.append(name)
            dispatcher = _read(x, type(x), parts, tensors, local, dispatcher)
    return dispatcher, parts, tensors


def _read(x: Any, kind: type, parts: list[Any], tensors: list[Tensor], local: Local | None, dispatcher: Any) -> Any:
    """Adds one argument to ``parts`` and ``tensors``. Returns the dispatcher of the first global tensor so far, or None."""
    if kind is GlobalTensor:
        parts.append(x._mw_spec)
        tensors.append(x)
        return x._mw_dispatcher if dispatcher is None else dispatcher
    if kind is Tensor:
        _read_plain(x, parts)
        tensors.append(x)
    elif kind is int:
        parts.append(x)
    elif kind in _CONSTANTS:
        parts += (kind, x)
    elif kind is float:
        parts += (float, x or str(x))  # 0.0 and -0.0 are equal
    elif kind is tuple or kind is list or kind is torch.Size:
        return _read_several(x, kind, parts, tensors, local, dispatcher)
    elif kind is slice:
        parts.append(slice)
        for y in (x.start, x.stop, x.step):
            dispatcher = _read(y, type(y), parts, tensors, local, dispatcher)
    elif isinstance(x, Tensor):
        part = local(x) if local is not None else None
        if part is not None:
            return _read(part, type(part), parts, tensors, None, dispatcher)
        if kind is nn.Parameter:
            _read_plain(x, parts)
        else:
            parts.append(NEVER)
        tensors.append(x)
    elif kind is dict:
        parts += (dict, len(x))
        for name, y in x.items():
            parts.append(name)
            dispatcher = _read(y, type(y), parts, tensors, local, dispatcher)
    else:
        parts.append(NEVER)
    return dispatcher


def _read_several(
    x: Any, kind: type, parts: list[Any], tensors: list[Tensor], local: Local | None, dispatcher: Any
) -> Any:
    """Adds a tuple or a list: most often, sizes."""
    if len(x) > _MANY and type(x[0]) in _NUMBERS:
        parts.append(NEVER)  # data, not sizes: too long to keep in a signature
        return dispatcher
    parts += (kind, len(x))
    for y in x:
        if type(y) is int:
            parts.append(y)
        else:
            dispatcher = _read(y, type(y), parts, tensors, local, dispatcher)
    return dispatcher


def _read_plain(x: Tensor, parts: list[Any]) -> None:
    """Adds a tensor that is not a ``GlobalTensor`` and so keeps no Spec."""
    if x.layout is _STRIDED:
        parts += (x.shape, x.dtype, x.is_cpu, x.is_contiguous() or x.stride())
    else:
        parts.append(NEVER)


def _autocast() -> Any:
    """The types to which autocast casts, by device. If it is on for another device alone, the decision is not kept."""
    enabled = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return tuple(enabled) or NEVER
