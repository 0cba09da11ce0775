"""One step: forward and backward over all microbatches, the mean over the global batch.

    rows of this rank ── split ──► microbatches, each: forward, loss · weight, backward
                                                   weight = its rows / rows of all ranks
    gradients are summed: over microbatches here, over data ranks by FSDP2, over tp by the view's conjugate moves

The mean is taken here and nowhere else: 1/N is in the weight, every reduction is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.private import python_body
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.rows.batch import (
    copied,
    has_rows,
    host_of,
    mapped,
    plain,
    tensors_in,
    with_host,
    with_shared,
    written,
)
from meshwright.runtime.rows.label_counter import Counted, LabelCounter, Slot
from meshwright.runtime.rows.loss_weights import MEAN, SUM, Share
from meshwright.submesh import bounds
from meshwright.watch.timer import CommunicationTimer

# backward() hands over to function modes, and those answer with themselves turned off; but what a backward makes again
# (recompute, a model's own checkpoints) needs the view. So its body is run, which keeps them on.
BACKWARD = python_body(torch.autograd.backward) or torch.autograd.backward


class Noticed(Exception):
    """Some rank has something to tell, in place of its rows. Raised on every rank."""


def called(model: nn.Module, batch: Any) -> Any:
    """What a model returns for a batch: a mapping of keyword arguments, a tuple of arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def rows_of(batch: Any) -> int:
    """Rows of a batch: dim 0 of its first tensor that has dims, and is not known to be shared by all rows."""
    for t in tensors_in(batch):
        if t.dim() and has_rows(t, t.shape[0]):
            return t.shape[0]
    raise ValueError("a batch needs at least one tensor with rows (dim 0)")


def amount_of(batch: Any) -> tuple[str, float]:
    """What the rows of a batch are, and how many: tokens, where rows are sequences of integers; else rows."""
    tokens = [t for t in tensors_in(batch) if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    rows = rows_of(batch)
    return ("tokens", float(rows * tokens[0].shape[1])) if tokens else ("rows", float(rows))


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of every tensor that has the batch's rows; the rest as it is."""
    rows = rows_of(batch)
    return mapped(lambda t: _rows(t, start, stop) if has_rows(t, rows) else t, batch)


def rows_of_rank(batch: Any, recipe: Recipe, rank: int) -> Any:
    """The rows of a rank, in their memory. ``batch``: of all data ranks together; each has as many rows, or one more."""
    batch = with_shared(plain(batch), recipe.shared_inputs)
    return take_rows(batch, *bounds(rows_of(batch), recipe.mesh.data_size)[recipe.mesh.data_index(rank)])


def _rows(t: Tensor, start: int, stop: int) -> Tensor:
    """Rows of a tensor, in its memory. To autograd they are no view of it: what a forward writes to some rows is no part
    of the graph of others."""
    rows, host = t[start:stop] if t.requires_grad else t[start:stop].detach(), host_of(t)
    return rows if host is None or host is t else with_host(rows, host[start:stop])


def microbatches(batch: Any, pieces: int) -> Iterator[Any]:
    """Pieces of a batch. Rows are the batch's own memory; of what has no rows each piece has a copy, but for the last.

    So each piece finds it as it was, as all rows do on one device, and a write to it is the caller's once.
    """
    rows = rows_of(batch)
    for i, (start, stop) in enumerate(bounds(rows, pieces)):
        yield take_rows(batch, start, stop) if i == pieces - 1 else _with_own_rest(batch, rows, start, stop)


def _with_own_rest(batch: Any, rows: int, start: int, stop: int) -> Any:
    others = iter(copied([t for t in tensors_in(batch) if not has_rows(t, rows)]))
    return mapped(lambda t: _rows(t, start, stop) if has_rows(t, rows) else next(others), batch)


@dataclass(frozen=True)
class Pieces:
    """What a rank runs in a step.

    Attributes:
        batches: the microbatches.
        scale: each one's weight in the mean.
        shares: the shares of its mean losses, where that weight is not enough.
        gathered: where this rank's rows begin in the one microbatch, if that has the rows of all data ranks.
        copies: how many data ranks run the same rows. Each runs them as one device does, with the same gradients: a hook may
            do with them what it would not do with a share of them.
    """

    batches: list[Any]
    scale: list[float]
    shares: list[Share | None]
    gathered: int | None = None
    copies: int = 1


def weights(
    pieces: list[Any],
    counter: LabelCounter | None,
    copies: int,
    *,
    among: Groups | None,
    way: str = MEAN,
    waiting: CommunicationTimer | None = None,
    stand_in: Any = None,
    notice: bool = False,
) -> tuple[list[float], list[Share | None]]:
    """What each microbatch's loss is multiplied by, and what its means are to be where that is not enough.

    Rows are counted by the host. Labels are counted where they lie; if that is a device, what follows from them stays there: no
    number is read.

    Args:
        copies: how many ranks see the same rows.
        among: all ranks, over which it is collective; None: of this rank's pieces only.
        way: how the losses of pieces make that of the batch (runtime/rows/loss_weights.py).
        stand_in: the row that runs for a piece without rows. It weighs nothing, and divides by what the others divide by:
            its own mask may be empty, and 0/0 has no finite gradient.
        notice: whether this rank has something to tell, and no pieces.

    Raises:
        Noticed: some rank has.
    """
    sizes = [rows_of(p) for p in pieces]
    counted = [counter.counted(p, n) if counter is not None and n else None for p, n in zip(pieces, sizes, strict=True)]
    own = [c for c in counted if c is not None]
    if among is None or counter is None:
        slots = tuple(sorted({slot for c in own for slot in c.sums}))
        rows, totals = _totals(sum(sizes), own, slots, among, waiting, notice)
    else:
        rows, totals = _totals_of_all(sum(sizes), own, counter, among, waiting, notice)
    every = rows if among is None else rows / copies
    totals = totals if among is None else {slot: total / copies for slot, total in totals.items()}
    scale, shares = [], []
    for size, count in zip(sizes, counted, strict=True):
        weight = size / every
        if not size and counter is not None and stand_in is not None:
            count = counter.counted(stand_in, 1)
            count = count if totals.keys() >= set(count.program.slots.values()) else None
        scale.append(weight if way != SUM else float(weight > 0))
        share = None if count is None or not count.program.matters else Share(count, totals, every, weight, way)
        shares.append(None if share is None or share.even else share)
    return scale, shares


def _totals_of_all(
    rows: int,
    counted: list[Counted],
    counter: LabelCounter,
    among: Groups,
    waiting: CommunicationTimer | None,
    notice: bool,
) -> tuple[float, dict[Slot, Tensor]]:
    """The sums of all ranks, whichever slots each of them knows: (rows, each slot's sum)."""
    rows_of_all, totals = _totals(rows, counted, counter.slots, among, waiting, notice)
    if totals is None:  # some rank's forward counts what not all know of
        everywhere: list[Any] = [None] * dist.get_world_size()
        own = sorted({slot for c in counted for slot in c.sums})
        dist.all_gather_object(everywhere, own, group=among.hosts[""])
        counter.slots = tuple(sorted({slot for slots in everywhere for slot in map(_as_slot, slots)}))
        rows_of_all, totals = _totals(rows, counted, counter.slots, among, waiting)
        assert totals is not None
    return rows_of_all, totals


def _totals(
    rows: int,
    counted: list[Counted],
    slots: Sequence[Slot],
    among: Groups | None,
    waiting: CommunicationTimer | None,
    notice: bool = False,
) -> tuple[float, Any]:
    """(rows of all ranks, the sum of each slot over all pieces of all ranks); None in place of these, if a rank has others.
    Raises Noticed if a rank has something to tell.

    What was counted on hosts is summed between hosts, with the rows. If a rank has counted on its device, sums are on devices.
    """
    host, values = torch.device("cpu"), [value for c in counted for value in c.sums.values()]
    device = among.device if among is not None else next((v.device for v in values if v.device.type != "cpu"), host)
    sums = {at: [torch.zeros(size, dtype=torch.float64, device=at) for _, _, size in slots] for at in (host, device)}
    places, more, away = {slot: i for i, slot in enumerate(slots)}, False, False
    for slot, value in (pair for c in counted for pair in c.sums.items()):
        if slot not in places:
            more = True
            continue
        at = host if value.device.type == "cpu" else device
        away = away or at != host
        sums[at][places[slot]] += value.flatten()
    head = torch.tensor([rows, more, away, notice], dtype=torch.float64, device=host)
    if among is not None:
        with waiting.on(between_hosts=True) if waiting is not None else nullcontext():
            among.sum([head, *sums[host]])
    every, unknown, on_devices, noticed = head.tolist()
    if noticed:
        raise Noticed
    if on_devices and among is not None:
        among.sum(sums[device])
    if unknown:
        return every, None
    if on_devices and device != host:
        return every, {
            slot: there + here.to(device, non_blocking=True)
            for slot, here, there in zip(slots, sums[host], sums[device], strict=True)
        }
    return every, dict(zip(slots, sums[host], strict=True))


def _as_slot(slot: Any) -> Slot:
    line, before, size = slot
    return line, before, size


def gather_rows(batch: Any, groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]]) -> tuple[Any, int]:
    """All rows of the global batch, on every rank: gathered over each group in turn, the innermost axis first.

    Args:
        batch: None if this rank has something to tell instead.
        groups: of each axis the group of its ranks, and the one of their hosts.

    Returns:
        The batch, with memory of its own, and where this rank's rows begin in it.

    Raises:
        Noticed: some rank has something to tell. Who hears of it on one axis tells it on the next.
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
        raise Noticed
    return batch, first


def _rows_of_each(rows: int, group: dist.ProcessGroup) -> list[int]:
    """How many rows each rank of a group has."""
    counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([rows], device="cpu"), group=group)
    return [int(c) for c in counts]


def _gathered(t: Tensor, rows: int, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    if not has_rows(t, rows):
        return tensors_in(copied(t))[0]
    padded = torch.cat([t.detach(), t.new_zeros((max(sizes) - rows, *t.shape[1:]))])
    sent = as_bytes(padded)
    chunks = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(chunks, sent, group=group)
    return torch.cat([chunk.view(t.dtype).view(padded.shape)[:n] for chunk, n in zip(chunks, sizes, strict=True)])


@torch.no_grad()
def write_back(gathered: Any, before: Sequence[int | None], batch: Any, first: int) -> None:
    """What a forward wrote to all rows is written to this rank's own rows of them, as it would be on one device.

    Args:
        gathered: the batch of all rows; ``before``: its ``versions`` when it was gathered.
        first: where this rank's rows begin in it.
    """
    ours, theirs, rows = tensors_in(batch), tensors_in(gathered), rows_of(batch)
    for i in written(gathered, before):
        value = theirs[i][first : first + rows] if has_rows(ours[i], rows) else theirs[i]
        if value.data_ptr() != ours[i].data_ptr():  # (one rank's rows are not gathered)
            ours[i].copy_(value)
