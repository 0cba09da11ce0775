"""Pieces of values that ranks exchange for branches, as bytes; and the arrival of an exchange that has begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout import in_one_dim
from meshwright.spmd.comm import Order, without_function_modes


@dataclass(frozen=True)
class OrderedGroup:
    """The ranks that differ from this one only on the tp axis of a place: among them its regions fork and join.

    Attributes:
        rank: this rank's index in the group.
        order: the order of their collectives.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    order: Order


@dataclass(frozen=True)
class RowPiece:
    """Rows ``start`` to ``stop`` of a joined value (all rows if ``stop`` is None).

    Attributes:
        number: the value.
        owners: the ranks of the line that have the piece.
        takers: the ranks of the line that need it, owners included.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int | None
    owners: tuple[int, ...]
    takers: tuple[int, ...]

    def sender(self, to: int) -> int | None:
        """The rank that sends the piece to rank ``to``; None if that rank has it, or does not take it."""
        return None if to in self.owners or to not in self.takers else self.owners[to % len(self.owners)]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Arrival:
    """An exchange that has begun.

    Attributes:
        work: the collective; None after ``wait``.
        sent: the memory that this rank sends. It must live until the collective has ended.
        on_arrival: functions to call, in order, when the received memory is filled.
    """

    work: dist.Work | None
    sent: Tensor | None
    on_arrival: list[Callable[[], Any]] = field(default_factory=list)

    @without_function_modes
    @torch.no_grad()
    def wait(self) -> None:
        """Waits until this rank has received everything, and others have received what it sent."""
        if self.work is not None:
            self.work.wait()
            for function in self.on_arrival:
                function()
        self.work, self.sent, self.on_arrival = None, None, []


def size_of(t: Tensor) -> int:
    """The size of a tensor in bytes."""
    return t.numel() * t.element_size()


def bytes_of(t: Tensor) -> Tensor:
    """The elements of a tensor as bytes, in order."""
    t = in_one_dim(t.detach().resolve_conj().resolve_neg())
    return t.view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8, device=t.device)


def typed(piece: Tensor, like: Tensor, arrival: Arrival) -> Tensor:
    """Received bytes as a tensor like ``like``; a copy, made on arrival, if they do not begin at an address for its dtype."""
    if not len(piece) or piece.storage_offset() % like.element_size():
        aligned = torch.empty(like.shape, dtype=like.dtype, device=piece.device)
        if len(piece):
            arrival.on_arrival.append(partial(aligned.view(-1).view(torch.uint8).copy_, piece))
        return aligned
    return piece.data.view(like.dtype).view(like.shape)  # (.data: a write to one must not count as a write to all)
