"""Rows that ranks send each other: all rows of the global batch, or the batch of one rank; and writes to them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.rows.batch import (
    HostTensor,
    copied,
    has_rows,
    mapped,
    tensors_in,
    versions,
    with_new_tensors,
    with_tensors,
    written_tensors,
)
from meshwright.runtime.rows.microbatches import NoticeError, rows_of


def broadcast_batch(batch: Any, source: int, groups: Groups) -> Any:
    """The batch of one rank, on every rank, in new memory. Collective over all ranks, between their hosts.

    Constants in the batch are those of this rank, too, unless one of them cannot be pickled: then each rank has its own.

    Args:
        batch: of each rank; only that of rank ``source`` is sent.
    """
    message: list[Any] = [None]
    if groups.rank == source:
        message = [(_form_to_send(batch), [HostTensor.of(t) for t in tensors_in(batch)])]
    dist.broadcast_object_list(message, src=source, group=groups.hosts[""])
    form, tensors = message[0]
    return with_tensors(batch if form is None else form, [t.on(groups.device) for t in tensors])


def _form_to_send(batch: Any) -> Any:
    """A batch with empty tensors; None if it cannot be pickled."""
    form = mapped(lambda _: torch.empty(0, device="cpu"), batch)
    try:
        pickle.dumps(form)
    except Exception:  # of whatever type: a person's object may raise any
        return None
    return form


def gather_rows(batch: Any, groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]]) -> tuple[Any, int]:
    """Gathers all rows of the global batch on every rank, over each group in turn, the innermost axis first.

    Args:
        batch: the rows of this rank; None if it has a problem to report instead.
        groups: for each axis (the group of its ranks, the group of their hosts).

    Returns:
        (the batch in new memory, the index of this rank's first row in it).

    Raises:
        NoticeError: some rank has a problem. A rank that learns of it on one axis passes it on along the next.
    """
    first = 0
    for group, hosts in groups:
        rows = -1 if batch is None else rows_of(batch)
        sizes = _rows_of_each(rows, hosts)
        if min(sizes) < 0:
            batch = None
            continue
        batch = mapped(lambda t, r=rows, s=sizes, g=group: _gathered(t, r, s, g), batch)  # type: ignore[misc]
        first += sum(sizes[: dist.get_rank(group)])
    if batch is None:
        raise NoticeError
    return batch, first


def _rows_of_each(rows: int, group: dist.ProcessGroup) -> list[int]:
    """The number of rows of each rank of a group."""
    counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([rows], device="cpu"), group=group)
    return [int(c) for c in counts]


def _gathered(t: Tensor, rows: int, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """A tensor of the batch with the rows of all ranks of a group; a copy, if it has no rows. Collective.

    Args:
        sizes: the number of rows of each rank; ``rows``: of this rank.
    """
    if not has_rows(t, rows):
        return tensors_in(copied(t))[0]
    padded = torch.cat([t.detach(), t.new_zeros((max(sizes) - rows, *t.shape[1:]))])
    padded_bytes = as_bytes(padded)
    chunks = [torch.empty_like(padded_bytes) for _ in sizes]
    dist.all_gather(chunks, padded_bytes, group=group)
    rows_of_each = [chunk.view(t.dtype).view(padded.shape)[:n] for chunk, n in zip(chunks, sizes, strict=True)]
    return torch.cat(rows_of_each).requires_grad_(t.requires_grad)


class GatheredInputs:
    """The gathered rows before a forward, and this rank's own rows in them. The forward may add tensors to the batch.

    Args:
        gathered: the batch of all rows.
        batch: this rank's rows; ``first``: the index of the first of them in ``gathered``.
    """

    def __init__(self, gathered: Any, batch: Any, first: int) -> None:
        self._gathered, self._before = with_new_tensors(gathered), versions(gathered)
        self._own, self._rows, self._first = tensors_in(batch), rows_of(batch), first

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies the writes of the forward to the gathered rows to this rank's own rows, as they would be on one device."""
        all_rows, first, rows = tensors_in(self._gathered), self._first, self._rows
        for i in written_tensors(self._gathered, self._before):
            value = all_rows[i][first : first + rows] if has_rows(self._own[i], rows) else all_rows[i]
            if value.data_ptr() != self._own[i].data_ptr():  # (with one data rank nothing is gathered)
                self._own[i].copy_(value)
