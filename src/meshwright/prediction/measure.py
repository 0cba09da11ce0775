"""``measured_rank``: measures a rank of a run on this machine: bytes as torch's allocator counts them, and seconds of a step.

The allocator reports each allocation and release to torch's profiler, including those within kernels and backends, which no
dispatch mode sees. But it does not report a release by a thread of a backend: gloo's thread may happen to hold the last
reference to a tensor of a collective. So at the begin of each step the living bytes are counted anew, from the tensors that
Python's garbage collector knows; and of several equal steps, the one with the smallest peak counts.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
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
"""Number of first steps that need more memory and time than later ones. The first step tries how rows combine. The second and
third record blocks as local programs (``replay``)."""


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of one rank.

    Attributes:
        peaks: peak bytes of each profiled step, including the first ``UNSTEADY`` ones.
        persistent: bytes that lived after the last of these steps.
        seconds: of each timed step, which ran without the profiler, from barrier to barrier.
    """

    peaks: tuple[int, ...]
    persistent: int
    seconds: tuple[float, ...]

    @property
    def peak(self) -> int:
        """The smallest peak of a step after the unsteady ones. Releases that were not reported only make a peak larger."""
        return min(self.peaks[UNSTEADY:])


def measured_rank(
    build: Any, batch: Any, plan: Plan, loss: Loss, optimizer: MakeOptimizer, max_norm: float | None, steps: int
) -> RankMeasurement:
    """Runs steps of a job and measures them. Collective: every rank calls it with equal arguments.

    Args:
        batch: the batch of all data ranks together.
        max_norm: the norm to which gradients are clipped; None: they are not clipped.
        steps: number of steps whose memory counts, at least 1. They run after ``UNSTEADY`` other steps. Then ``steps`` further
            steps are timed.
    """
    job = make_job(build, plan.replace(verify=0, weights="drawn"), batch=batch, loss=loss)
    rows = copied(rows_of_rank(batch, job.recipe, job.rank))
    run = _Steps(job, rows, optimizer(job.parameters()), max_norm)
    peaks, persistent = cpu_peaks(run.step, tensors_of_job(job, rows), UNSTEADY + steps)
    return RankMeasurement(peaks, persistent, tuple(run.timed() for _ in range(steps)))


def tensors_of_job(job: Job, rows: Any) -> list[Tensor]:
    """The tensors that a rank holds before its first step: parameters, buffers and its rows."""
    return [*job.parameters(), *job.module.buffers(), *tensors_in(rows)]


def cpu_peaks(step: Callable[[], None], held: Iterable[Tensor], steps: int) -> tuple[tuple[int, ...], int]:
    """Runs steps on the CPU. Returns (peak bytes of each, bytes that live after the last).

    Args:
        held: the tensors of the run before its first step. Other tensors that live then are not counted.
    """
    others = _bytes(_living()) - _bytes(held)
    live = []  # bytes before each step, and after the last
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(steps):
            live.append(_bytes(_living()) - others)
            with record_function(_STEP):
                step()
    live.append(_bytes(_living()) - others)
    return _peaks(profiler, live), live[-1]


class _Steps:
    """Training steps of a job: forward, backward, clip, optimizer."""

    def __init__(self, job: Job, rows: Any, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        self._job, self._rows, self._optimizer, self._max_norm = job, rows, optimizer, max_norm

    def step(self) -> None:
        self._job.step(self._rows)
        if self._max_norm is not None:
            self._job.clip_grad_norm_(self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def timed(self) -> float:
        """Runs a step, and returns its seconds until the slowest rank has ended."""
        dist.barrier()
        began = time.perf_counter()
        self.step()
        dist.barrier()
        return time.perf_counter() - began


def _bytes(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    """Bytes of the storages of tensors. A storage that several tensors share counts once."""
    storages = {
        storage_of(local): local.untyped_storage().nbytes()
        for t in tensors
        if not t.is_meta
        for local in [local_tensor(t)]
    }
    return sum(storages.values())


def _living() -> list[Tensor]:
    """Every tensor on the CPU that Python's garbage collector knows."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    return [
        t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.layout is torch.strided
    ]


def _peaks(profiler: Any, begins: Sequence[int]) -> tuple[int, ...]:
    """Peak bytes of each step. ``begins``: bytes that live at the begin of each step.

    Private: torch has no public way to read the single events of its CPU allocator.
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
