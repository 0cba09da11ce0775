"""``Wire``: the collectives of forks and joins: an all-reduce of gradients, and an all-to-all of pieces as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.branches.pieces import Arrival, OrderedGroup, bytes_of, size_of, typed
from meshwright.spmd.comm import Ledger


class Wire:
    """The collectives of forks and joins, counted.

    Args:
        ledger: counts calls and bytes, as ``fork`` and ``join``.

    Attributes:
        lines: place → the ranks among which its regions fork and join.
    """

    def __init__(self, lines: Mapping[int, OrderedGroup], ledger: Ledger, device: torch.device) -> None:
        self.lines, self._ledger, self._device = lines, ledger, device
        self._begun: list[Arrival] = []  # exchanges that may not have ended

    def finish(self) -> None:
        """Waits for everything that was sent."""
        begun, self._begun = self._begun, []
        for arrival in begun:
            arrival.wait()

    def all_reduce(self, around: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums of gradients over the ranks of this rank's line in a place: one all-reduce for each dtype."""
        sums: list[Tensor | None] = [None] * len(gradients)
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            indices = [i for i, g in enumerate(gradients) if g.dtype == dtype]
            flat = torch.cat([torch.view_as_real(g).reshape(-1) if g.is_complex() else g.reshape(-1)
                              for g in (gradients[i] for i in indices)])  # fmt: skip
            self._ledger.moved("fork", flat)
            self.lines[around].order.enter("fork", flat.shape, flat.dtype)
            dist.all_reduce(flat, group=self.lines[around].group)
            base = 0
            for i in indices:
                width = gradients[i].numel() * (2 if dtype.is_complex else 1)
                piece, base = flat[base : base + width], base + width
                g = torch.view_as_complex(piece.view(-1, 2)) if dtype.is_complex else piece
                sums[i] = g.view(gradients[i].shape)
        return [g for g in sums if g is not None]

    def all_to_all(
        self, kind: str, line: OrderedGroup, sent: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]
    ) -> tuple[list[list[Tensor]], Arrival]:
        """Exchanges tensors in one all-to-all. They are sent as bytes, as dtypes are mixed.

        Args:
            sent: for each rank of the line the tensors for it; those for this rank itself are not sent.
            wanted: for each rank of the line tensors like those that it sends.

        Returns:
            (for each rank the received tensors, whose memory is not filled before the arrival; the arrival to wait for).
        """
        outgoing = [[bytes_of(t) for t in tensors] for tensors in sent]
        flat = torch.cat([t for r, tensors in enumerate(outgoing) if r != line.rank for t in tensors]
                         or [torch.empty(0, dtype=torch.uint8, device=self._device)])  # fmt: skip
        sizes = [sum(size_of(t) for t in tensors) * (r != line.rank) for r, tensors in enumerate(wanted)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self._ledger.moved(kind, flat)
        line.order.note(kind)
        out_sizes = [sum(t.numel() for t in tensors) * (r != line.rank) for r, tensors in enumerate(outgoing)]
        collective = dist.all_to_all_single(buffer, flat, sizes, out_sizes, group=line.group, async_op=True)
        arrival = Arrival(collective, flat)
        self._begun = [*(a for a in self._begun if a.work is not None), arrival]
        received: list[list[Tensor]] = []
        base = 0
        for r, tensors in enumerate(wanted):
            received.append([])
            for i, like in enumerate(tensors):
                # (A clone: autograd may use the memory of a gradient for a parameter's, and add to it before the wait.)
                piece = outgoing[r][i].clone() if r == line.rank else buffer[base : (base := base + size_of(like))]
                received[-1].append(typed(piece, like, arrival))
        return received, arrival
