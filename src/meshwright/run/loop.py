"""The training loop: a few lines that the examples and the command line share.

for each global batch, this rank's rows:  step ─ clip ─ optimizer ─ zero_grad ─ tell
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree
from meshwright.run.job import Job
from meshwright.run.step import bounds, rows_of, take_rows


@dataclass(frozen=True)
class Progress:
    """One step, as it is told.

    Attributes:
        step: from 1 to ``steps``.
        loss: the mean over the global batch.
        grad_norm: of all gradients, before clipping.
        rate: ``unit`` (tokens or rows) of all ranks a second, of this step.
        memory: bytes this process holds; on a GPU, the most its tensors have held.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    rate: float
    unit: str
    memory: int


def train(
    job: Job,
    data: Any,
    *,
    steps: int,
    global_batch: int | None = None,
    lr: float = 3e-4,
    clip: float = 1.0,
    seed: int = 0,
    on_step: Callable[[Progress], None] | None = None,
) -> list[float]:
    """Trains with AdamW. Collective: every rank calls it alike.

    Args:
        data: a dataset, as ``job.batches`` takes it; without ``global_batch``, one batch, which every step repeats.
        steps: optimizer steps; the dataset is gone through as often as that needs.
        global_batch: rows a step, over all ranks.
        lr: AdamW's.
        clip: the global 2-norm that gradients are clipped to.
        seed: of the order of rows.
        on_step: told after every step, on every rank.

    Returns:
        The loss of each step.

    Raises:
        PlanError: ``global_batch`` does not divide by data ranks × microbatches.
    """
    optimizer = torch.optim.AdamW(job.parameters(), lr=lr)
    batches = (
        _repeated(job, data)
        if global_batch is None
        else iter(job.batches(data, global_batch, seed=seed, epochs=None, drop_last=_rows(data) >= global_batch))
    )
    losses: list[float] = []
    for step in range(1, steps + 1):
        batch = next(batches)
        started = time.perf_counter()
        loss = job.step(batch)
        norm = job.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if on_step is not None:
            unit, count = _amount(job, batch)
            rate = count / (time.perf_counter() - started)
            on_step(Progress(step, steps, losses[-1], norm.item(), rate, unit, memory(job.groups.device)))
    return losses


def memory(device: torch.device) -> int:
    """Bytes: the most that tensors have held of a GPU; on a CPU what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as counts:
            return int(counts.read().split()[1]) * _page_size()
    except OSError:  # not Linux: the most that it has held
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _page_size() -> int:
    import resource

    return resource.getpagesize()


def _repeated(job: Job, batch: Any) -> Iterator[Any]:
    """This rank's rows of one batch, again and again."""
    mesh = job.recipe.mesh
    start, stop = bounds(rows_of(batch), mesh.data_size)[mesh.data_index(job.rank)]
    mine = pytree.tree_map_only(Tensor, lambda t: t.to(job.groups.device), take_rows(batch, start, stop))
    while True:
        yield mine


def _rows(data: Any) -> int:
    return rows_of(data) if isinstance(data, dict | tuple) else len(data)


def _amount(job: Job, batch: Any) -> tuple[str, float]:
    """What a step works on: tokens, where rows are sequences of integers; else rows. Of all data ranks."""
    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
    tokens = [t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    rows = rows_of(batch) * job.recipe.mesh.data_size
    return ("tokens", float(rows * tokens[0].shape[1])) if tokens else ("rows", float(rows))
