"""The interface from a stage to the runtime: ``Exchange`` forks and joins branches, ``Streams`` runs blocks concurrently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshwright.graph import ModelGraph
from meshwright.regions import Fork, Join


def _at_once() -> None:
    """The ``wait`` of a join all of whose values have arrived."""


@dataclass(frozen=True)
class JoinResult:
    """The result of a join.

    Attributes:
        values: number of a value → the tensor with which the place around computes, for each value that this rank takes.
        tail: a tensor of autograd that ties the next region of that place to this one.
        arriving: the values that other ranks send; their memory is filled when ``wait`` has returned.
    """

    values: Mapping[int, Tensor]
    tail: Tensor
    arriving: frozenset[int] = frozenset()
    wait: Callable[[], None] = _at_once


class Exchange(Protocol):
    """Forks and joins branches (runtime/branches/exchange.py). A *place* is the number of a submesh; 0 is the trunk."""

    def fork(
        self, move: Fork, values: Mapping[int, Tensor], graph: ModelGraph, tail: Tensor | None
    ) -> tuple[dict[tuple[int, int], Tensor], Tensor]:
        """({(value, branch): the tensor with which the branch computes}, an anchor for the join of the region)."""

    def join(
        self, move: Join, branch_values: Mapping[int, Tensor], graph: ModelGraph, anchors: Sequence[Tensor]
    ) -> JoinResult:
        """Values of branches become values of the place around. ``branch_values``: those of this rank's branch."""

    def keep_for_fork(self, around: int, number: int, t: Tensor) -> None:
        """Keeps a value of this rank's branch, which a later fork gives to other branches."""

    def take_rows(self, place: int, t: Tensor) -> Tensor:
        """The rows of a tensor that this rank runs in a place."""

    def row_counts(self, place: int) -> tuple[int, int]:
        """(number of all rows, number of rows that this rank runs in a place)."""

    def inside(self, place: int) -> AbstractContextManager[None]:
        """A context in which code of a branch runs, with the random numbers of the branch."""

    def padded(self, place: int, rows: Tensor, like: Tensor) -> Tensor:
        """A tensor with the shape and strides of ``like``: this rank's rows at their position, zeros for all other rows."""

    def ones_like(self, like: Tensor) -> Tensor:
        """Ones of the shape of ``like``, for a value that this rank does not need."""


@dataclass(frozen=True)
class RunningBlock:
    """A block whose forward has begun; ``finish`` waits for it and returns its result."""

    finish: Callable[[], Any]


class Streams(Protocol):
    """Runs blocks concurrently on one rank (runtime/branches/streams.py)."""

    def start(
        self, stream: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RunningBlock:
        """Begins a block's forward."""
