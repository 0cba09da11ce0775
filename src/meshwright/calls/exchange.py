"""What a part of a model asks of the runtime: forks and joins of branches, and blocks that run beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshwright.graph import ModelGraph
from meshwright.regions import Fork, Join


def _at_once() -> None:
    """Nothing is on its way."""


@dataclass(frozen=True)
class Joined:
    """What a join gives.

    Attributes:
        values: value → what the place around computes with, where this rank takes it.
        tail: what ties the next region of that place to this one.
        arriving: the values whose memory is filled by others, and not before ``wait`` has returned.
    """

    values: Mapping[int, Tensor]
    tail: Tensor
    arriving: frozenset[int] = frozenset()
    wait: Callable[[], None] = _at_once


class Exchange(Protocol):
    """What forks and joins (runtime/branches/exchange.py)."""

    def fork(
        self, move: Fork, values: Mapping[int, Tensor], graph: ModelGraph, tail: Tensor | None
    ) -> tuple[dict[tuple[int, int], Tensor], Tensor]:
        """(value, branch) → what it computes with; and an anchor, for the join of the region."""

    def join(self, move: Join, made_here: Mapping[int, Tensor], graph: ModelGraph, anchors: Sequence[Tensor]) -> Joined:
        """Values of branches become those of the place around. ``made_here``: those of this rank's branch."""

    def lend(self, around: int, number: int, t: Tensor) -> None:
        """This rank's branch made a value that a fork to come gives to others."""

    def share(self, place: int, t: Tensor) -> Tensor:
        """The rows of a tensor that this rank runs in a place."""

    def portion(self, place: int) -> tuple[int, int]:
        """How many rows there are, and how many of them this rank runs in a place."""

    def inside(self, place: int) -> AbstractContextManager[None]:
        """For the time of a part of a branch."""

    def among_all(self, place: int, rows: Tensor, like: Tensor) -> Tensor:
        """This rank's rows in a place, at their place among all rows, which are zeros; strides are those of ``like``."""

    def stand_in(self, like: Tensor) -> Tensor:
        """Ones for a value that this rank has no need of."""


@dataclass(frozen=True)
class Started:
    """A block whose work has begun; ``finish`` waits for it and gives its result."""

    finish: Callable[[], Any]


class Streams(Protocol):
    """What runs blocks at the same time on one rank (runtime/branches/streams.py)."""

    def start(self, stream: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
        """Begins a block's forward."""
