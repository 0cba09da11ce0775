"""``Wire``: carries tensors between the ranks of a place, for forks and joins: sums, and parts in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.branches.pieces import Arrival, Line, bytes_of, size_of, typed
from meshwright.spmd.comm import Ledger


class Wire:
    """The collectives of forks and joins, counted.

    Args:
        ledger: where calls and bytes are counted, as ``fork`` and ``join``.

    Attributes:
        lines: place → the ranks among whom its regions fork and join.
    """

    def __init__(self, lines: Mapping[int, Line], ledger: Ledger, device: torch.device) -> None:
        self.lines, self._ledger, self._device = lines, ledger, device
        self._begun: list[Arrival] = []  # exchanges that this rank has not waited for

    def finish(self) -> None:
        """All that was sent has arrived."""
        begun, self._begun = self._begun, []
        for arrival in begun:
            arrival.wait()

    def summed(self, around: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients, summed over the ranks of a place: one all-reduce a type."""
        sums: list[Tensor | None] = [None] * len(gradients)
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            chosen = [i for i, g in enumerate(gradients) if g.dtype == dtype]
            flat = torch.cat([torch.view_as_real(g).reshape(-1) if g.is_complex() else g.reshape(-1)
                              for g in (gradients[i] for i in chosen)])  # fmt: skip
            self._ledger.moved("fork", flat)
            self.lines[around].order.enter("fork", flat.shape, flat.dtype)
            dist.all_reduce(flat, group=self.lines[around].group)
            base = 0
            for i in chosen:
                width = gradients[i].numel() * (2 if dtype.is_complex else 1)
                piece, base = flat[base : base + width], base + width
                g = torch.view_as_complex(piece.view(-1, 2)) if dtype.is_complex else piece
                sums[i] = g.view(gradients[i].shape)
        return [g for g in sums if g is not None]

    def swapped(
        self, kind: str, line: Line, sent: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]
    ) -> tuple[list[list[Tensor]], Arrival]:
        """What other ranks send, in one all-to-all, in bytes, as types are mixed: the memory, which is filled when waited for.

        Args:
            sent: to each rank of the line; what is for this one itself stays.
            wanted: from each rank, like these.
        """
        out = [[bytes_of(t) for t in row] for row in sent]
        flat = torch.cat([t for r, row in enumerate(out) if r != line.rank for t in row]
                         or [torch.empty(0, dtype=torch.uint8, device=self._device)])  # fmt: skip
        sizes = [sum(size_of(t) for t in row) * (r != line.rank) for r, row in enumerate(wanted)]
        got = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self._ledger.moved(kind, flat)
        line.order.note(kind)
        out_sizes = [sum(t.numel() for t in row) * (r != line.rank) for r, row in enumerate(out)]
        work = dist.all_to_all_single(got, flat, sizes, out_sizes, group=line.group, async_op=True)
        arrival = Arrival(work, flat)
        self._begun = [*(a for a in self._begun if a.work is not None), arrival]
        received: list[list[Tensor]] = []
        base = 0
        for r, row in enumerate(wanted):
            received.append([])
            for i, like in enumerate(row):
                # (Autograd may give a parameter the memory of a gradient, and add to it before it is waited for.)
                piece = out[r][i].clone() if r == line.rank else got[base : (base := base + size_of(like))]
                received[-1].append(typed(piece, like, arrival))
        return received, arrival
