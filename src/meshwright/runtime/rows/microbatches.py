"""The rows of a step: a rank's microbatches, with the weight of each in the mean over the global batch.

    rows of this rank ── split ──► microbatches, each: forward, loss · weight, backward
                                                   weight = its rows / rows of all ranks
    gradients are summed: over microbatches here, over data ranks by FSDP2, over tp by the conjugates of collectives

The mean is computed here and nowhere else: 1/N is in the weight, every reduction is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.structure import snapshot
from meshwright.private import python_body
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.rows.batch import (
    copied,
    has_rows,
    host_of,
    mapped,
    plain,
    tensors_in,
    with_host,
    with_shared,
)
from meshwright.runtime.rows.label_counter import LabelCounter, LabelCounts
from meshwright.runtime.rows.label_program import SumId
from meshwright.runtime.rows.loss_weights import MEAN, SUM, MeanFactors
from meshwright.submesh import bounds
from meshwright.watch.timer import CommunicationTimer

# ``torch.autograd.backward`` calls function modes, which are off while they answer. But recomputed forwards (recompute, a
# model's own checkpoints) need the SPMD mode. So the Python body of ``backward`` is called, during which modes stay on.
BACKWARD = python_body(torch.autograd.backward) or torch.autograd.backward


class NoticeError(Exception):
    """Some rank has a problem to report instead of rows. Raised on every rank."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a mapping of keyword arguments, a tuple of arguments, or one argument."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with which a model is called for a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


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
    """The rows of a rank, in the memory of ``batch``, which has the rows of all data ranks. Numbers of rows differ by at most
    one."""
    batch = with_shared(plain(batch), recipe.shared_inputs)
    return take_rows(batch, *bounds(rows_of(batch), recipe.mesh.data_size)[recipe.mesh.data_index(rank)])


def _rows(t: Tensor, start: int, stop: int) -> Tensor:
    """Rows of a tensor, in its memory. They are no view to autograd: a write of a forward to some rows must not be a part of
    the graph of other rows."""
    rows, host = t[start:stop] if t.requires_grad else t[start:stop].detach(), host_of(t)
    return rows if host is None or host is t else with_host(rows, host[start:stop])


def split_batch(batch: Any, pieces: int) -> Iterator[Any]:
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
class Microbatches:
    """The rows that a rank runs in a step.

    Attributes:
        batches: the microbatches.
        weights: the weight of each microbatch in the mean.
        factors: for each microbatch the factors for its means, if the weight is not enough; else None.
        first_row: where this rank's rows begin, if there is one microbatch with the rows of all data ranks; else None.
        copies: the number of data ranks that run the same rows. Each has the gradients of one device, not a share of them, so
            that hooks on gradients work as on one device.
    """

    batches: list[Any]
    weights: list[float]
    factors: list[MeanFactors | None]
    first_row: int | None = None
    copies: int = 1

    def with_other_containers(self) -> Microbatches:
        """The same tensors in other lists, dicts and objects, which stay as they are if a forward changes its own."""
        return replace(self, batches=[snapshot(batch, lambda t: t) for batch in self.batches])


def weigh_microbatches(
    batches: list[Any],
    counter: LabelCounter | None,
    copies: int,
    *,
    groups: Groups | None,
    way: str = MEAN,
    timer: CommunicationTimer | None = None,
    stand_in: Any = None,
    notice: bool = False,
) -> tuple[list[float], list[MeanFactors | None]]:
    """Weighs the losses of microbatches, so that they add up to the loss of the batch. Collective, if there are ``groups``.

    Rows are counted on the host. Labels are counted where they are; if that is a device, their sums stay there, and the host
    reads no number.

    Args:
        batches: the microbatches of this rank.
        counter: counts labels; None: weights by rows alone.
        copies: the number of ranks that have the same rows.
        groups: of all ranks, whose rows and labels count; None: only the microbatches of this rank count.
        way: how the losses combine into the loss of the batch (runtime/rows/loss_weights.py).
        timer: measures the time in collectives.
        stand_in: the row that runs for a microbatch without rows. Its weight is 0, and it has the divisors of the others: its
            own mask may be empty, and 0/0 has no finite gradient.
        notice: whether this rank has a problem to report, and no microbatches.

    Returns:
        (the weight of each microbatch's loss; for each the factors for its means, or None if the weight is enough).

    Raises:
        NoticeError: some rank has a problem.
    """
    sizes = [rows_of(batch) for batch in batches]
    counts_or_none = [
        counter.count(batch, rows) if counter is not None and rows else None
        for batch, rows in zip(batches, sizes, strict=True)
    ]
    counts = [c for c in counts_or_none if c is not None]
    if groups is None or counter is None:
        sum_ids = tuple(sorted({sum_id for c in counts for sum_id in c.sums}))
        all_rows, totals = _totals(sum(sizes), counts, sum_ids, groups, timer, notice)
    else:
        all_rows, totals = _totals_of_all(sum(sizes), counts, counter, groups, timer, notice)
    if groups is not None:  # the sums have each row ``copies`` times
        all_rows, totals = all_rows / copies, {sum_id: total / copies for sum_id, total in totals.items()}
    weights: list[float] = []
    factors: list[MeanFactors | None] = []
    for rows, count in zip(sizes, counts_or_none, strict=True):
        weight = rows / all_rows
        if not rows and counter is not None and stand_in is not None:
            count = counter.count(stand_in, 1)
            count = count if totals.keys() >= set(count.program.sums.values()) else None
        weights.append(weight if way != SUM else float(weight > 0))
        mean_factors = None
        if count is not None and count.program.uses_counts:
            mean_factors = MeanFactors(count, totals, all_rows, weight, way)
        factors.append(None if mean_factors is None or mean_factors.are_all_one else mean_factors)
    return weights, factors


def _totals_of_all(
    rows: int,
    counts: list[LabelCounts],
    counter: LabelCounter,
    groups: Groups,
    timer: CommunicationTimer | None,
    notice: bool,
) -> tuple[float, dict[SumId, Tensor]]:
    """(number of all rows, identity of a sum → its total over all ranks), also if ranks know different sums. Collective."""
    all_rows, totals = _totals(rows, counts, counter.common_sums, groups, timer, notice)
    if totals is None:  # some rank has sums that not all ranks know
        everywhere: list[Any] = [None] * dist.get_world_size()
        sum_ids = sorted({sum_id for c in counts for sum_id in c.sums})
        dist.all_gather_object(everywhere, sum_ids, group=groups.hosts[""])
        counter.common_sums = tuple(sorted({sum_id for ids in everywhere for sum_id in map(_as_sum_id, ids)}))
        all_rows, totals = _totals(rows, counts, counter.common_sums, groups, timer)
        assert totals is not None
    return all_rows, totals


def _totals(
    rows: int,
    counts: list[LabelCounts],
    sum_ids: Sequence[SumId],
    groups: Groups | None,
    timer: CommunicationTimer | None,
    notice: bool = False,
) -> tuple[float, Any]:
    """Adds up rows and sums over all microbatches of all ranks.

    Sums on hosts are added up between hosts, together with the rows. If a rank counted on its device, totals are on devices.

    Returns:
        (number of rows, identity of a sum → its total); None in place of the totals if a rank has other sums.

    Raises:
        NoticeError: some rank has a problem.
    """
    host = _HOST
    devices = (value.device for c in counts for value in c.sums.values() if value.device.type != "cpu")
    device = groups.device if groups is not None else next(devices, host)
    sums, has_other_sums, uses_device = _sums_of_rank(counts, sum_ids, device)
    head = torch.tensor([rows, has_other_sums, uses_device, notice], dtype=torch.float64, device=host)
    if groups is not None:
        with timer.on(between_hosts=True) if timer is not None else nullcontext():
            groups.sum([head, *sums[host]])
    all_rows, some_unknown, on_devices, some_notice = head.tolist()
    if some_notice:
        raise NoticeError
    if on_devices and groups is not None:
        groups.sum(sums[device])
    if some_unknown:
        return all_rows, None
    if on_devices and device != host:
        return all_rows, {
            sum_id: on_device + on_host.to(device, non_blocking=True)
            for sum_id, on_host, on_device in zip(sum_ids, sums[host], sums[device], strict=True)
        }
    return all_rows, dict(zip(sum_ids, sums[host], strict=True))


def _sums_of_rank(
    counts: list[LabelCounts], sum_ids: Sequence[SumId], device: torch.device
) -> tuple[dict[torch.device, list[Tensor]], bool, bool]:
    """The sums of this rank's microbatches, added up on the host or device where they are.

    Returns:
        ({host or device: each sum there}, whether microbatches have other sums, whether some sums are on the device).
    """
    sums = {at: [torch.zeros(size, dtype=torch.float64, device=at) for _, _, size in sum_ids] for at in (_HOST, device)}
    indices = {sum_id: i for i, sum_id in enumerate(sum_ids)}
    has_other_sums = uses_device = False
    for sum_id, value in (item for c in counts for item in c.sums.items()):
        if sum_id not in indices:
            has_other_sums = True
            continue
        at = _HOST if value.device.type == "cpu" else device
        uses_device = uses_device or at != _HOST
        sums[at][indices[sum_id]] += value.flatten()
    return sums, has_other_sums, uses_device


_HOST = torch.device("cpu")


def _as_sum_id(received: Any) -> SumId:
    line, sums_before, size = received
    return line, sums_before, size
