"""The training loop: what the examples and the command line share.

    resume ─► for each global batch, this rank's rows:

              step ─ clip ─ agree ─┬─ finite: optimizer ──┬─ zero_grad ─ tell ─ save, every so often
                                   ├─ not, skip: counted ─┘
                                   └─ not, stop: NonFiniteError          told to stop: save ─ Preempted

What all ranks do in the same way is decided in ``agree``, from numbers of all ranks (train/agreement.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint import folder as checkpoints
from meshwright.checkpoint.lock import PATIENCE, Lock, hold
from meshwright.checkpoint.talk import RankAgreement
from meshwright.errors import Finding, NonFiniteError
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import mapped, moved
from meshwright.runtime.rows.microbatches import amount_of, rows_of, rows_of_rank
from meshwright.train.agreement import agree, culprit, tells_memory
from meshwright.train.metrics import Metrics
from meshwright.train.progress import Progress
from meshwright.train.sigterm import Notice, Preempted
from meshwright.watch.watchdog import Watch

if TYPE_CHECKING:
    from meshwright.checkpoint.save import Saving
    from meshwright.runtime.rows.batches import Batches

T = TypeVar("T")

__all__ = ["NonFiniteError", "Preempted", "Progress", "Record", "memory", "train"]


@dataclass(frozen=True)
class Record:
    """Where a run is kept, and how: its checkpoints and its metrics.

    Attributes:
        folder: ``step-…`` of each checkpoint, and ``metrics.jsonl``. What is in it is gone on from.
        save_every: steps from one checkpoint to the next; None: one at the end. One is saved too on SIGTERM.
        keep: how many checkpoints; None: all.
        asynchronous: training goes on while a checkpoint is written.
        tensorboard: also events for TensorBoard.
        observe_every: steps from one that is observed (``Job.observe``) to the next; None: none is. The first is the third
            step that is done here: the first ones record, compile and allocate.
    """

    folder: Path
    save_every: int | None = None
    keep: int | None = None
    asynchronous: bool = False
    tensorboard: bool = False
    observe_every: int | None = None


_WARM = 3  # steps done here until one is like those that follow


def train(
    job: Job,
    data: Any,
    *,
    steps: int,
    global_batch: int | None = None,
    lr: float = 3e-4,
    clip: float = 1.0,
    seed: int = 0,
    num_workers: int = 0,
    on_step: Callable[[Progress], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    record: Record | None = None,
    timeout: float | None = None,
) -> list[float]:
    """Trains with AdamW. Collective: every rank calls it alike.

    With a ``record``, a run resumes from the newest checkpoint of its folder, or, if that is damaged, from the one before: in
    the same layout to the same losses, bitwise on a CPU. In another layout it has the same global batches. On a GPU, sums may
    be taken in another order from run to run. The folder is this run's alone while it lasts.

    Args:
        data: a dataset, as ``job.batches`` takes it; without ``global_batch``, one batch, which every step repeats.
        steps: total number of optimizer steps, including those before a resume; the dataset is gone through as often as that
            needs.
        global_batch: rows a step, over all ranks.
        lr: AdamW's.
        clip: the global 2-norm that gradients are clipped to.
        seed: of the order of rows.
        num_workers: how many processes of each rank read rows ahead of the steps; see ``Job.batches``.
        on_step: told after every step, on every rank.
        on_note: told, on rank 0, what a person should know: that it waits for another run in the folder, that a checkpoint
            is damaged. Default: standard error is.
        record: where checkpoints and metrics go; None: nowhere.
        timeout: seconds without any progress after which a report is made and the processes end (see ``Watch``); longer
            than the longest step or compilation. None: ranks wait as long as their process groups do.

    Returns:
        The loss of each step that was done here.

    Raises:
        PlanError: ``global_batch`` does not divide by data ranks × microbatches, in a run that is not resumed.
        CheckpointError: all checkpoints are damaged, or the newest is another model's; or another run holds the folder.
        NonFiniteError: the loss or a gradient is not finite, and the plan says to stop. On every rank.
        Preempted: SIGTERM came, on any rank, and a checkpoint was saved. On every rank.
    """
    with ExitStack() as stack:
        notice = Notice()
        if record is not None:  # else there is nothing to save, and the signal may end the process at once
            stack.enter_context(notice)
            folder, patience = record.folder, min(PATIENCE, job.groups.timeout / 2)  # the other ranks wait for rank 0
            _first(job, folder, lambda: _until_closed(stack, hold(folder, patience=patience, tell=on_note)))
        watch = None
        if timeout is not None:
            watch = stack.enter_context(Watch(job, timeout, folder=None if record is None else record.folder))
        run = _Run(job, data, steps, global_batch, lr, seed, num_workers, record, notice, on_note or _tell)
        stack.callback(run.close)
        if watch is not None:
            watch.step = run.step
        losses: list[float] = []
        for step in range(run.step + 1, steps + 1):
            told = run.do(step, clip)
            losses.append(told.loss)
            if on_step is not None:
                on_step(told)
            run.keep(step, losses)
        run.finish()
        return losses


class _Run:
    """A run, from where it goes on."""

    def __init__(
        self,
        job: Job,
        data: Any,
        steps: int,
        global_batch: int | None,
        lr: float,
        seed: int,
        num_workers: int,
        record: Record | None,
        notice: Notice,
        tell: Callable[[str], None],
    ) -> None:
        self.job, self.steps, self.record, self.notice = job, steps, record, notice
        self.step = self.skipped = self.saved = 0
        self.saving: Saving | None = None
        self.stopping, self.began = False, 0
        self.metrics: Metrics | None = None
        parameters = list(job.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, foreach=together(parameters))
        resumes = record is not None and _first(
            job, record.folder, lambda: checkpoints.newest(record.folder) is not None
        )
        self.batches: Batches | None = None
        if global_batch is not None:
            whole = _rows(data) >= global_batch
            self.batches = job.batches(
                data, global_batch, seed=seed, epochs=None, drop_last=whole, uneven=resumes, num_workers=num_workers
            )
        if record is not None and resumes:
            loaded = job.load(record.folder, self.optimizer, data=self.batches, or_before=True)
            for note in loaded.notes if job.rank == 0 else ():
                tell(note)
            for group in self.optimizer.param_groups:  # a checkpoint has it as it was in its layout
                group["foreach"] = together(parameters)
            self.step = self.saved = loaded.step
            self.skipped = (loaded.extra or {}).get("skipped", 0)
        job.guard.optimizers = self.optimizer
        self.began = self.step
        self.rows = _repeated(job, data) if self.batches is None else iter(self.batches)
        if record is not None:
            _first(job, record.folder, lambda: self._open(record))

    def _open(self, record: Record) -> None:
        self.metrics = Metrics(record.folder, self.step, tensorboard=record.tensorboard)

    def do(self, step: int, clip: float) -> Progress:
        """One step."""
        started, batch = time.perf_counter(), next(self.rows)
        if not self._observes(step):
            return self._do(step, batch, clip, started)
        with self.job.observe(self.optimizer) as seen:
            told = self._do(step, batch, clip, started)
        if self.metrics is not None and seen.timeline is not None:
            self.metrics.timeline(step, self.job.recipe.plan, seen.timeline.to_json())
        return told

    def _observes(self, step: int) -> bool:
        every = None if self.record is None else self.record.observe_every
        done = step - self.began
        return every is not None and done >= _WARM and (done - _WARM) % every == 0

    def _do(self, step: int, batch: Any, clip: float, started: float) -> Progress:
        job, before = self.job, self.job.guard.last
        unit, amount = amount_of(batch)
        try:
            loss, norm = job.step(batch), job.clip_grad_norm_(clip)
        finally:
            compared = job.guard.last if job.guard.last is not before else None
            if compared is not None and self.metrics is not None:
                self.metrics.verdict(compared.step, compared.counts, compared.differences)
        held = memory(job.groups.device)
        with job.runner.stages.phase("agree"):
            verdict = agree(
                job, loss, norm, stop=self.notice.given, amount=amount, seconds=time.perf_counter() - started,
                memory=held if tells_memory(step, job.recipe.mesh.size) else None,
            )  # fmt: skip
        job.finish_step()
        self.stopping = verdict.stop
        finite = not (verdict.loss or verdict.gradient)
        if not finite and job.recipe.nonfinite == "stop":
            why = culprit(job, verdict)
            self.settle()
            raise NonFiniteError(step, why)
        if finite:
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        told = Progress(
            step, self.steps, verdict.value, verdict.norm, verdict.amount / seconds, unit, held,
            verdict.waited, self.skipped, seconds, verdict.memories, {} if compared is None else compared.counts,
        )  # fmt: skip
        if self.metrics is not None:
            self.metrics.write(told)
        self.step = step
        return told

    def keep(self, step: int, losses: list[float]) -> None:
        """Saves, where it is time to; raises Preempted after that, where a rank was told to stop."""
        if self.record is None:
            return
        every = self.record.save_every
        if self.stopping or (every and step % every == 0):
            self.save(wait=self.stopping or not self.record.asynchronous)
        if self.stopping:
            self.finish()
            raise Preempted(step, losses)

    def save(self, *, wait: bool) -> None:
        """A checkpoint of this step."""
        assert self.record is not None
        self.saving = self.job.save(
            self.record.folder, self.optimizer, step=self.step, data=self.batches, extra={"skipped": self.skipped},
            keep=self.record.keep, wait=wait,
        )  # fmt: skip
        self.saved = self.step

    def finish(self) -> None:
        """The last step is saved, and nothing is being written any more."""
        if self.record is not None and self.saved < self.step:
            self.save(wait=True)
        self.settle()

    def settle(self) -> None:
        """Nothing is being written any more."""
        if self.saving is not None:
            self.saving.wait()

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()


def together(parameters: Sequence[Tensor]) -> bool | None:
    """Whether an optimizer is to update all parameters by the same few calls (``foreach``); None: as torch does.

    Torch's own answer is no for DTensors, each of which then takes a dozen calls, with DTensor's work for each. They go
    together if they lie on one mesh.
    """
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    return True if len(meshes) == 1 and None not in meshes else None


def _first(job: Job, folder: Path, work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank: another may see a file system a moment later. Its error is every rank's."""
    failed = Finding(str(folder), "it could not be used", "a folder that rank 0 can write to")
    return RankAgreement(job.groups.files).first(work, failed)


def _until_closed(stack: ExitStack, lock: Lock) -> None:
    stack.callback(lock.release)


def _tell(note: str) -> None:
    print(f"meshwright: {note}", file=sys.stderr, flush=True)


def memory(device: torch.device) -> int:
    """Bytes: the most that tensors have held of a GPU since this was asked last; on a CPU what the process holds now."""
    if device.type != "cpu":
        most: int = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return most
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
    mine = mapped(lambda t: moved(t, job.groups.device), rows_of_rank(batch, job.recipe, job.rank))
    while True:
        yield mine


def _rows(data: Any) -> int:
    return rows_of(data) if isinstance(data, dict | tuple) else len(data)
