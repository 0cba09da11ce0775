"""One step: forward and backward over all microbatches, the mean over the global batch.

    rows of this rank ── split ──► microbatches, each: forward, loss · weight, backward
                                                   weight = its rows / rows of all ranks
    gradients are summed: over microbatches here, over data ranks by FSDP2, over tp by the conjugates of collectives

The mean is computed here and nowhere else: 1/N is in the weight, every reduction is a sum.
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

# ``torch.autograd.backward`` calls function modes, which are off while they answer. But recomputed forwards (recompute, a
# model's own checkpoints) need the SPMD mode. So the Python body of ``backward`` is called, during which modes stay on.
BACKWARD = python_body(torch.autograd.backward) or torch.autograd.backward


class Noticed(Exception):
    """Some rank has a problem to report instead of rows. Raised on every rank."""


def called(model: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a mapping of keyword arguments, a tuple of arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: the size of dim 0 of its first tensor that has dims and is not shared by all rows.

    Raises:
        ValueError: no tensor has rows.
    """
    for t in tensors_in(batch):
        if t.dim() and has_rows(t, t.shape[0]):
            return t.shape[0]
    raise ValueError("a batch needs at least one tensor with rows (dim 0)")


def amount_of(batch: Any) -> tuple[str, float]:
    """("tokens", their number) of a batch if its rows are sequences of integers; else ("rows", their number)."""
    tokens = [t for t in tensors_in(batch) if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    rows = rows_of(batch)
    return ("tokens", float(rows * tokens[0].shape[1])) if tokens else ("rows", float(rows))


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of every tensor with rows; other tensors as they are."""
    rows = rows_of(batch)
    return mapped(lambda t: _rows(t, start, stop) if has_rows(t, rows) else t, batch)


def rows_of_rank(batch: Any, recipe: Recipe, rank: int) -> Any:
    """The rows of a rank, in the same memory. ``batch``: the rows of all data ranks; numbers of rows differ by at most one."""
    batch = with_shared(plain(batch), recipe.shared_inputs)
    return take_rows(batch, *bounds(rows_of(batch), recipe.mesh.data_size)[recipe.mesh.data_index(rank)])


def _rows(t: Tensor, start: int, stop: int) -> Tensor:
    """Rows of a tensor, in its memory. To autograd they are no view of it, so that a write of a forward to some rows is not
    part of the graph of other rows."""
    rows, host = t[start:stop] if t.requires_grad else t[start:stop].detach(), host_of(t)
    return rows if host is None or host is t else with_host(rows, host[start:stop])


def microbatches(batch: Any, pieces: int) -> Iterator[Any]:
    """The pieces of a batch. Rows are in the batch's memory. Tensors without rows are copied for each piece except the last.

    So each piece finds the original values there, as all rows do on one device, and the caller sees a write to them once.
    """
    rows = rows_of(batch)
    for i, (start, stop) in enumerate(bounds(rows, pieces)):
        yield take_rows(batch, start, stop) if i == pieces - 1 else _with_copies(batch, rows, start, stop)


def _with_copies(batch: Any, rows: int, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of a batch, with copies of the tensors without rows."""
    others = iter(copied([t for t in tensors_in(batch) if not has_rows(t, rows)]))
    return mapped(lambda t: _rows(t, start, stop) if has_rows(t, rows) else next(others), batch)


@dataclass(frozen=True)
class Pieces:
    """The rows that a rank runs in a step.

    Attributes:
        batches: the microbatches.
        scale: the weight of each microbatch in the mean.
        shares: for each microbatch how to scale its means, if the weight is not enough; else None.
        gathered: if there is one microbatch with the rows of all data ranks: where this rank's rows begin in it.
        copies: the number of data ranks that run the same rows. Each has the gradients of one device, not a share of them, so
            that hooks on gradients work as on one device.
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
    """(the weight of each microbatch's loss, for each how to scale its means or None if the weight is enough).

    Rows are counted on the host. Labels are counted where they are; if that is a device, their sums stay there, and the host
    reads no number.

    Args:
        pieces: the microbatches of this rank.
        counter: counts labels; None: weights by rows alone.
        copies: the number of ranks that have the same rows.
        among: all ranks, over which it is collective; None: only the pieces of this rank count.
        way: how the losses of pieces make the loss of the batch (runtime/rows/loss_weights.py).
        waiting: measures the time in collectives.
        stand_in: the row that runs for a piece without rows. Its weight is 0, and it has the divisors of the others: its own
            mask may be empty, and 0/0 has no finite gradient.
        notice: whether this rank has a problem to report, and no pieces.

    Raises:
        Noticed: some rank has a problem.
    """
    sizes = [rows_of(p) for p in pieces]
    counted = [counter.counted(p, n) if counter is not None and n else None for p, n in zip(pieces, sizes, strict=True)]
    counts = [c for c in counted if c is not None]
    if among is None or counter is None:
        slots = tuple(sorted({slot for c in counts for slot in c.sums}))
        rows, totals = _totals(sum(sizes), counts, slots, among, waiting, notice)
    else:
        rows, totals = _totals_of_all(sum(sizes), counts, counter, among, waiting, notice)
    all_rows = rows if among is None else rows / copies
    totals = totals if among is None else {slot: total / copies for slot, total in totals.items()}
    scale, shares = [], []
    for size, count in zip(sizes, counted, strict=True):
        weight = size / all_rows
        if not size and counter is not None and stand_in is not None:
            count = counter.counted(stand_in, 1)
            count = count if totals.keys() >= set(count.program.slots.values()) else None
        scale.append(weight if way != SUM else float(weight > 0))
        share = None if count is None or not count.program.matters else Share(count, totals, all_rows, weight, way)
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
    """(number of all rows, slot → sum over all ranks), also if ranks know different slots."""
    rows_of_all, totals = _totals(rows, counted, counter.slots, among, waiting, notice)
    if totals is None:  # some rank has slots that not all ranks know
        everywhere: list[Any] = [None] * dist.get_world_size()
        own_slots = sorted({slot for c in counted for slot in c.sums})
        dist.all_gather_object(everywhere, own_slots, group=among.hosts[""])
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
    """(number of rows of all ranks, slot → its sum over all pieces of all ranks); None instead of the sums if a rank has other
    slots. Raises Noticed if a rank has a problem.

    Counts on hosts are summed between hosts, together with the rows. If a rank counted on its device, sums are on devices.
    """
    host = _HOST
    devices = (value.device for c in counted for value in c.sums.values() if value.device.type != "cpu")
    device = among.device if among is not None else next(devices, host)
    sums, has_other_slots, uses_device = _sums_of_rank(counted, slots, device)
    head = torch.tensor([rows, has_other_slots, uses_device, notice], dtype=torch.float64, device=host)
    if among is not None:
        with waiting.on(between_hosts=True) if waiting is not None else nullcontext():
            among.sum([head, *sums[host]])
    all_rows, some_unknown, on_devices, some_notice = head.tolist()
    if some_notice:
        raise Noticed
    if on_devices and among is not None:
        among.sum(sums[device])
    if some_unknown:
        return all_rows, None
    if on_devices and device != host:
        return all_rows, {
            slot: on_device + on_host.to(device, non_blocking=True)
            for slot, on_host, on_device in zip(slots, sums[host], sums[device], strict=True)
        }
    return all_rows, dict(zip(slots, sums[host], strict=True))


def _sums_of_rank(
    counted: list[Counted], slots: Sequence[Slot], device: torch.device
) -> tuple[dict[torch.device, list[Tensor]], bool, bool]:
    """The counts of this rank's pieces, added up where they are.

    Returns:
        ({host or device: the sum of each slot there}, whether pieces have other slots, whether some counts are on the device).
    """
    sums = {at: [torch.zeros(size, dtype=torch.float64, device=at) for _, _, size in slots] for at in (_HOST, device)}
    numbers = {slot: i for i, slot in enumerate(slots)}
    has_other_slots = uses_device = False
    for slot, value in (item for c in counted for item in c.sums.items()):
        if slot not in numbers:
            has_other_slots = True
            continue
        at = _HOST if value.device.type == "cpu" else device
        uses_device = uses_device or at != _HOST
        sums[at][numbers[slot]] += value.flatten()
    return sums, has_other_slots, uses_device


_HOST = torch.device("cpu")


def _as_slot(slot: Any) -> Slot:
    line, before, size = slot
    return line, before, size


def gather_rows(batch: Any, groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]]) -> tuple[Any, int]:
    """Gathers all rows of the global batch on every rank, over each group in turn, the innermost axis first.

    Args:
        batch: the rows of this rank; None if it has a problem to report instead.
        groups: for each axis (the group of its ranks, the group of their hosts).

    Returns:
        (the batch in new memory, the index of this rank's first row in it).

    Raises:
        Noticed: some rank has a problem. A rank that learns of it on one axis passes it on along the next.
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
    """The number of rows of each rank of a group."""
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
    """Copies the writes of a forward to the gathered rows back to this rank's own rows, as they would be on one device.

    Args:
        gathered: the batch of all rows; ``before``: its ``versions`` when it was gathered.
        batch: this rank's rows; ``first``: the index of the first of them in ``gathered``.
    """
    local, all_rows, rows = tensors_in(batch), tensors_in(gathered), rows_of(batch)
    for i in written(gathered, before):
        value = all_rows[i][first : first + rows] if has_rows(local[i], rows) else all_rows[i]
        if value.data_ptr() != local[i].data_ptr():  # (with one data rank nothing is gathered)
            local[i].copy_(value)
