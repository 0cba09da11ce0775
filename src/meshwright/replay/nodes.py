"""The entries of a recording: one ``Node`` for each call, with numbers for tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree
from meshwright.spmd import patches
from meshwright.spmd.comm import Axis
from meshwright.spmd.torch_functions import label_of


@dataclass(frozen=True)
class Value:
    """Stands for a tensor in a program: the number of a node's result or of an input of the program."""

    number: int


@dataclass(frozen=True)
class InputSource:
    """Where an input of a program comes from, at each call.

    Attributes:
        kind: ``argument``; ``parameter``, ``buffer`` or ``attribute`` of a module; or ``move``: the result of a collective
            on an argument or parameter that was made before the call.
        at: for an argument its number among the tensors of the call; else (the module's name within the block, the
            attribute's name).
        move: for kind ``move``, the name of the collective.
    """

    kind: str
    at: Any
    move: str = ""


class MoveCall:
    """A collective over an axis, or the begin or end of sharded work (spmd/redistribute.py), as a function of one tensor.

    Args:
        function: the autograd function.
        axis: the mesh axis.
        options: further arguments of the autograd function.
    """

    def __init__(self, function: Any, axis: Axis, options: tuple[Any, ...]) -> None:
        self.function, self.axis, self.options = function, axis, options
        self.__name__ = f"{_spelled(function.__name__)}_{axis.name}"
        self._apply = patches.apply_of(function)

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            moved: Tensor = self._apply(x, self.axis, *self.options)
        else:
            moved = self.function.compute(x, self.axis, *self.options)
        return moved

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MoveCall) and (self._token() == other._token())

    def __hash__(self) -> int:
        return hash(self._token())

    def _token(self) -> Hashable:
        return self.function, id(self.axis), self.options

    @property
    def name(self) -> str:
        """The names of the move and of its axis (``all_reduce_tp``)."""
        return self.__name__


def _spelled(name: str) -> str:
    """``AllReduce`` → ``all_reduce``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


AUTOCAST_DEVICES = "cpu", "cuda"
"""The device types whose autocast a program follows."""


@dataclass(frozen=True)
class CallUnderMode:
    """A torch function that ran under another grad or autocast mode than the block (within the model's ``torch.no_grad()``).

    Attributes:
        function: the torch function.
        grad: whether gradients are enabled.
        autocast: (device type, dtype or None for off) for each device type whose autocast differs from the block's.
    """

    function: Callable[..., Any]
    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d, _ in self.autocast]
        with torch.set_grad_enabled(self.grad):
            try:
                for device, dtype in self.autocast:
                    torch.set_autocast_enabled(device, dtype is not None)
                    if dtype is not None:
                        torch.set_autocast_dtype(device, dtype)
                return self.function(*args, **kwargs)
            finally:
                for device, enabled, dtype in before:
                    torch.set_autocast_enabled(device, enabled)
                    torch.set_autocast_dtype(device, dtype)

    @property
    def __name__(self) -> str:
        return label_of(self.function)


@dataclass(frozen=True)
class Node:
    """One call.

    Attributes:
        target: the function.
        args, kwargs: its arguments, with a ``Value`` for each tensor.
        results: the numbers of the tensors in the result, in order; None for an argument that is returned.
        several: whether the result is a tuple or list.
        line: the model's source line.
        bytes: for a collective, the bytes that this rank puts into it; else 0.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    several: bool
    line: str
    bytes: int = 0

    @property
    def structure(self) -> Hashable:
        """A value that is equal for nodes that make the same call. Source lines may differ."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        return self.target, tuple(map(_token, leaves)), spec, self.results, self.several


def _token(x: Any) -> Hashable:
    """A constant with its type, to compare: Python has 1 == 1.0 == True, and 0.0 == -0.0."""
    if isinstance(x, slice):
        return slice, _token(x.start), _token(x.stop), _token(x.step)
    return type(x), str(x) if isinstance(x, float) else x
