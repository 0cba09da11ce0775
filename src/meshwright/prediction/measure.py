"""What a rank of a run on this machine takes: bytes as torch's own allocator counts them, and seconds of a step.

The allocator reports every allocation and release to torch's profiler: those within kernels and backends too, of which no
dispatch mode sees anything. A release by a thread of a backend's is not reported: gloo's thread may be the last to hold what a
collective was given, by chance. So at the begin of each step the bytes that live are counted anew, from the tensors that
Python's garbage collector knows, and the step with the smallest peak counts, of several that do the same.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.private import storage_of
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import copied, tensors_in
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.runtime.weights.parameters import local_tensor

_STEP = "meshwright.step"
UNSTEADY = 3
"""Steps that take more than those that follow: the first tries how rows combine, in the second and third blocks are recorded
as local programs (``replay``)."""


@dataclass(frozen=True)
class Measured:
    """Of one rank.

    Attributes:
        peaks: bytes that lived at most in each step, the ``UNSTEADY`` ones first.
        kept: bytes that lived between steps, after the last.
        seconds: of each step without the profiler, from barrier to barrier.
    """

    peaks: tuple[int, ...]
    persistent: int
    seconds: tuple[float, ...]

    @property
    def peak(self) -> int:
        """The peak of a step after the unsteady ones: the smallest, as what is not reported adds to it."""
        return min(self.peaks[UNSTEADY:])


def measured_rank(
    build: Any, batch: Any, plan: Plan, loss: Loss, optimizer: MakeOptimizer, max_norm: float | None, steps: int
) -> Measured:
    """Runs steps, and measures them. Collective: every rank calls it alike.

    Args:
        batch: of all data ranks together.
        steps: at least 1, of which memory is measured, after ``UNSTEADY`` ones; as many again are timed.
    """
    job = make_job(build, plan.replace(verify=0, weights="drawn"), batch=batch, loss=loss)
    rows = copied(rows_of_rank(batch, job.recipe, job.rank))
    run = _Steps(job, rows, optimizer(job.parameters()), max_norm)
    others = _bytes(_living()) - _bytes([*job.parameters(), *job.module.buffers(), *tensors_in(rows)])
    live = []  # bytes before each step, and after the last
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(UNSTEADY + steps):
            live.append(_bytes(_living()) - others)
            with record_function(_STEP):
                run.step()
    live.append(_bytes(_living()) - others)
    return Measured(_peaks(profiler, live), live[-1], tuple(run.timed() for _ in range(steps)))


class _Steps:
    """Steps of a job with its optimizer."""

    def __init__(self, job: Job, rows: Any, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        self._job, self._rows, self._optimizer, self._max_norm = job, rows, optimizer, max_norm

    def step(self) -> None:
        self._job.step(self._rows)
        if self._max_norm is not None:
            self._job.clip_grad_norm_(self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def timed(self) -> float:
        """Seconds of a step, of the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        self.step()
        dist.barrier()
        return time.perf_counter() - began


def _bytes(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    """Of the storages of tensors, each once."""
    storages = {
        storage_of(local): local.untyped_storage().nbytes()
        for t in tensors
        if not t.is_meta
        for local in [local_tensor(t)]
    }
    return sum(storages.values())


def _living() -> list[Tensor]:
    """Every tensor that Python's garbage collector knows, and that has memory here."""
    gc.collect()
    living = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    return [
        t for t in living if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.layout is torch.strided
    ]


def _peaks(profiler: Any, begins: Sequence[int]) -> tuple[int, ...]:
    """Bytes that live at most in each step. ``begins``: those that live when it begins.

    Private: there is no public way to the single events of an allocator on a CPU.
    """
    events = profiler.profiler.kineto_results.events()
    starts = sorted(event.start_ns() for event in events if event.name() == _STEP)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peaks, live, step = list(begins[: len(starts)]), begins[0], 0
    for nanoseconds, nbytes in changes:
        current = max(0, bisect_right(starts, nanoseconds) - 1)
        if current != step:
            step, live = current, begins[current]
        live += nbytes
        peaks[step] = max(peaks[step], live)
    return tuple(peaks)
