"""What a recording writes down: ``Node`` by ``Node``, tensors as numbers."""

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
    """Stands for a tensor in a program: the number of the node's result, or of the program's input."""

    number: int


@dataclass(frozen=True)
class Source:
    """Where an input of a program comes from, at each call.

    Attributes:
        kind: ``argument`` (its number among the tensors of the call), ``move`` (of an argument or a parameter: what a
            collective has made of it before the call), ``parameter``, ``buffer`` or ``attribute`` of a module.
        at: for an argument its number; else (the module's name within the block, the name there).
        move: which one.
    """

    kind: str
    at: Any
    move: str = ""


class Move:
    """A collective over an axis, or the beginning or the end of sharded work (spmd/redistribute.py), as a torch function.

    Args:
        function: the autograd function.
        axis: over which it goes.
        options: its further arguments.
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
        return isinstance(other, Move) and (self._token() == other._token())

    def __hash__(self) -> int:
        return hash(self._token())

    def _token(self) -> Hashable:
        return self.function, id(self.axis), self.options

    @property
    def name(self) -> str:
        """Of the move, and of its axis."""
        return self.__name__


def _spelled(name: str) -> str:
    """``AllReduce`` → ``all_reduce``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


@dataclass(frozen=True)
class Under:
    """A torch function in a region of the model's own: without gradients, say, or with another autocast.

    Attributes:
        function: the torch function.
        grad: whether gradients are on.
        autocast: (device, type or None for off) of each device whose autocast differs from the block's.
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
                for device, enabled, kept in before:
                    torch.set_autocast_enabled(device, enabled)
                    torch.set_autocast_dtype(device, kept)

    @property
    def __name__(self) -> str:
        return label_of(self.function)


@dataclass(frozen=True)
class Node:
    """One call.

    Attributes:
        target: what is called.
        args, kwargs: with a ``Value`` for each tensor.
        results: the numbers of the tensors that come out, in their order; None for what is no tensor, or comes out of the
            arguments.
        several: whether they come in a tuple or list.
        line: the model's source line.
        bytes: that this rank puts into a collective.
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
        """Equal for nodes that do the same; source lines may differ."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        return self.target, tuple(map(_token, leaves)), spec, self.results, self.several


def _token(x: Any) -> Hashable:
    """A constant by type and value: 1, 1.0 and True are equal, as are 0.0 and -0.0."""
    if isinstance(x, slice):
        return slice, _token(x.start), _token(x.stop), _token(x.step)
    return type(x), str(x) if isinstance(x, float) else x
