"""What ranks send each other where branches part and meet: parts of values, as bytes, in exchanges that have begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout import in_one_dim
from meshwright.spmd.comm import Order, locally


@dataclass(frozen=True)
class Line:
    """The tp ranks of a place around this rank, among whom its regions fork and join."""

    group: dist.ProcessGroup
    rank: int
    size: int
    order: Order


@dataclass(frozen=True)
class Piece:
    """A part of a joined value: rows ``start`` to ``stop`` of it (all of it where ``stop`` is None), and who has it."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int | None
    owners: tuple[int, ...]
    takers: tuple[int, ...]

    def sender(self, to: int) -> int | None:
        """Who sends it to a rank; None where that has it, or takes nothing of it."""
        return None if to in self.owners or to not in self.takers else self.owners[to % len(self.owners)]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Arrival:
    """An exchange that has begun.

    Attributes:
        sent: the memory of what this rank sends.
        then: what is to be done with what it gets, in turn.
    """

    work: dist.Work | None
    sent: Tensor | None
    then: list[Callable[[], Any]] = field(default_factory=list)

    @locally
    @torch.no_grad()
    def wait(self) -> None:
        """Until all that was sent to this rank is there, and what it sent has been taken."""
        if self.work is not None:
            self.work.wait()
            for act in self.then:
                act()
        self.work, self.sent, self.then = None, None, []


def size_of(t: Tensor) -> int:
    """In bytes."""
    return t.numel() * t.element_size()


def bytes_of(t: Tensor) -> Tensor:
    """The elements of a tensor, in order, as bytes."""
    t = in_one_dim(t.detach().resolve_conj().resolve_neg())
    return t.view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8, device=t.device)


def typed(piece: Tensor, like: Tensor, arrival: Arrival) -> Tensor:
    """Received bytes as the tensor that they are; where they do not begin as its type must, a copy, once they are there."""
    if not len(piece) or piece.storage_offset() % like.element_size():
        aligned = torch.empty(like.shape, dtype=like.dtype, device=piece.device)
        if len(piece):
            arrival.then.append(partial(aligned.view(-1).view(torch.uint8).copy_, piece))
        return aligned
    return piece.data.view(like.dtype).view(like.shape)  # (data: what is written to one is not written to all)
