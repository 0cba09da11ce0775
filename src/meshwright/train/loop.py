"""The training loop of the examples and the command line.

    resume ─► for each global batch, this rank's rows:

              step ─ clip ─ agree ─┬─ finite: optimizer step ─────────┬─ zero_grad ─ report ─ save, if it is time
                                   ├─ not finite, skip: count the step ┘
                                   └─ not finite, stop: NonFiniteError         SIGTERM: save ─ Preempted

Decisions that all ranks must take alike follow from ``agree``, which sums numbers of all ranks (train/agreement.py).
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
from meshwright.checkpoint.rank_agreement import RankAgreement
from meshwright.errors import Finding, NonFiniteError
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import mapped, moved
from meshwright.runtime.rows.microbatches import amount_of, rows_of, rows_of_rank
from meshwright.train.agreement import agree, not_finite_text, reports_memory
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
    """Where and how a run saves its checkpoints and metrics.

    Attributes:
        folder: for ``step-…`` of each checkpoint, and ``metrics.jsonl``. A run resumes from the newest checkpoint in it.
        save_every: steps from one checkpoint to the next. None: one at the end. SIGTERM also saves one.
        keep: number of newest checkpoints to keep. None: all.
        asynchronous: whether training continues while a checkpoint is written.
        tensorboard: whether to write events for TensorBoard.
        observe_every: steps from one observed step (``Job.observe``) to the next. None: no step is observed. The first is the
            third step of this process, since the first ones record, compile and allocate.
    """

    folder: Path
    save_every: int | None = None
    keep: int | None = None
    asynchronous: bool = False
    tensorboard: bool = False
    observe_every: int | None = None


_WARM = 3  # the first step of this process that takes as long as later ones: earlier steps record, compile and allocate


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
    """Trains with AdamW. Collective: every rank calls it with the same arguments.

    With a ``record``, a run resumes from the newest checkpoint of its folder; if that is damaged, from the one before. In the
    same layout, a resumed run has the same losses as one without a break, bitwise on a CPU; on a GPU, the order of sums may
    change from run to run. In another layout, it has the same global batches. No other run can use the folder at the same
    time.

    Args:
        job: the model under a plan.
        data: a dataset, as ``job.batches`` takes it; without ``global_batch``, one batch, which every step repeats.
        steps: total number of optimizer steps, including those before a resume. The dataset is repeated as often as needed.
        global_batch: number of rows in a step, over all ranks.
        lr: learning rate of AdamW.
        clip: largest global L2 norm of the gradients.
        seed: of the order of rows.
        num_workers: number of processes of each rank that read rows ahead of the steps; see ``Job.batches``.
        on_step: called after every step, on every rank.
        on_note: called on rank 0 with notes for a person: that it waits for another run in the folder, that a checkpoint is
            damaged. Default: prints to standard error.
        record: where checkpoints and metrics go. None: nothing is saved.
        timeout: seconds without any progress after which a watchdog reports and ends the processes (see ``Watch``). It must
            be longer than the longest step or compilation. None: ranks wait as long as their process groups do.

    Returns:
        The loss of each step that ran in this call.

    Raises:
        PlanError: ``global_batch`` does not divide by data ranks × microbatches, in a run that is not resumed.
        CheckpointError: all checkpoints are damaged, or the newest is of another model; or another run holds the folder.
        NonFiniteError: the loss or a gradient is not finite, and the plan says to stop. On every rank.
        Preempted: a rank got SIGTERM, and a checkpoint was saved. On every rank.
    """
    with ExitStack() as stack:
        notice = Notice()
        if record is not None:  # without a record there is nothing to save, and SIGTERM may end the process at once
            stack.enter_context(notice)
            folder, patience = record.folder, min(PATIENCE, job.groups.timeout / 2)  # the other ranks wait for rank 0
            _on_rank_0(job, folder, lambda: _release_at_end(stack, hold(folder, patience=patience, tell=on_note)))
        watch = None
        if timeout is not None:
            watch = stack.enter_context(Watch(job, timeout, folder=None if record is None else record.folder))
        run = _Run(job, data, steps, global_batch, lr, seed, num_workers, record, notice, on_note or _tell)
        stack.callback(run.close)
        if watch is not None:
            watch.step = run.step
        losses: list[float] = []
        for step in range(run.step + 1, steps + 1):
            progress = run.do(step, clip)
            losses.append(progress.loss)
            if on_step is not None:
                on_step(progress)
            run.save_if_due(step, losses)
        run.finish()
        return losses


class _Run:
    """The state of a run: the optimizer, the position in the data, counts, and files.

    Attributes:
        step: the last step that was done, including steps before a resume.
        began: the value of ``step`` at the start of this process.
        saved: the step of the last checkpoint.
        skipped: number of steps that were not finite.
        stopping: whether a rank has got SIGTERM.
    """

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
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, foreach=foreach_setting(parameters))
        resumes = record is not None and _on_rank_0(
            job, record.folder, lambda: checkpoints.newest(record.folder) is not None
        )
        self.batches: Batches | None = None
        if global_batch is not None:
            has_full_batch = _rows(data) >= global_batch
            self.batches = job.batches(
                data, global_batch, seed=seed, epochs=None, drop_last=has_full_batch, uneven=resumes,
                num_workers=num_workers,
            )  # fmt: skip
        if record is not None and resumes:
            loaded = job.load(record.folder, self.optimizer, data=self.batches, or_before=True)
            for note in loaded.notes if job.rank == 0 else ():
                tell(note)
            for group in self.optimizer.param_groups:  # the loaded value is that of the saved layout
                group["foreach"] = foreach_setting(parameters)
            self.step = self.saved = loaded.step
            self.skipped = (loaded.extra or {}).get("skipped", 0)
        job.guard.optimizers = self.optimizer
        self.began = self.step
        self.rows = _repeated(job, data) if self.batches is None else iter(self.batches)
        if record is not None:
            _on_rank_0(job, record.folder, lambda: self._open(record))

    def _open(self, record: Record) -> None:
        self.metrics = Metrics(record.folder, self.step, tensorboard=record.tensorboard)
        self.metrics.start(self.job.recipe.plan)

    def do(self, step: int, clip: float) -> Progress:
        """Runs one step with the next batch. If the step is due to be observed, also writes its timeline."""
        started, batch = time.perf_counter(), next(self.rows)
        if not self._is_observed(step):
            return self._do(step, batch, clip, started)
        with self.job.observe(self.optimizer) as observation:
            progress = self._do(step, batch, clip, started)
        if self.metrics is not None and observation.timeline is not None:
            self.metrics.timeline(step, self.job.recipe.plan, observation.timeline.to_json())
        return progress

    def _is_observed(self, step: int) -> bool:
        every = None if self.record is None else self.record.observe_every
        done = step - self.began
        return every is not None and done >= _WARM and (done - _WARM) % every == 0

    def _do(self, step: int, batch: Any, clip: float, started: float) -> Progress:
        """Runs one step. ``started``: the time before its batch was read. Raises NonFiniteError as ``train`` does."""
        job, before = self.job, self.job.guard.last
        unit, amount = amount_of(batch)
        try:
            loss, norm = job.step(batch), job.clip_grad_norm_(clip)
        finally:
            compared = job.guard.last if job.guard.last is not before else None
            if compared is not None and self.metrics is not None:
                self.metrics.verdict(compared.step, compared.counts, compared.differences)
        nbytes = memory(job.groups.device)
        with job.runner.stages.phase("agree"):
            agreement = agree(
                job, loss, norm, stop=self.notice.received, amount=amount, seconds=time.perf_counter() - started,
                memory=nbytes if reports_memory(step, job.recipe.mesh.size) else None,
            )  # fmt: skip
        job.finish_step()
        self.stopping = agreement.stop
        finite = not (agreement.bad_loss or agreement.bad_gradient)
        if not finite and job.recipe.nonfinite == "stop":
            reason = not_finite_text(job, agreement)
            self.wait_for_save()
            raise NonFiniteError(step, reason)
        if finite:
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        progress = Progress(
            step, self.steps, agreement.loss, agreement.norm, agreement.amount / seconds, unit, nbytes,
            agreement.waited, self.skipped, seconds, agreement.memories, {} if compared is None else compared.counts,
        )  # fmt: skip
        if self.metrics is not None:
            self.metrics.write(progress)
        self.step = step
        return progress

    def save_if_due(self, step: int, losses: list[float]) -> None:
        """Saves a checkpoint every ``save_every`` steps, and if a rank has got SIGTERM. In that case raises Preempted."""
        if self.record is None:
            return
        every = self.record.save_every
        if self.stopping or (every and step % every == 0):
            self.save(wait=self.stopping or not self.record.asynchronous)
        if self.stopping:
            self.finish()
            raise Preempted(step, losses)

    def save(self, *, wait: bool) -> None:
        """Saves a checkpoint of the last step. ``wait``: until it is written."""
        assert self.record is not None
        self.saving = self.job.save(
            self.record.folder, self.optimizer, step=self.step, data=self.batches, extra={"skipped": self.skipped},
            keep=self.record.keep, wait=wait,
        )  # fmt: skip
        self.saved = self.step

    def finish(self) -> None:
        """Saves the last step, if it has not been saved, and waits until it is written."""
        if self.record is not None and self.saved < self.step:
            self.save(wait=True)
        self.wait_for_save()

    def wait_for_save(self) -> None:
        """Waits until the last checkpoint is written."""
        if self.saving is not None:
            self.saving.wait()

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()


def foreach_setting(parameters: Sequence[Tensor]) -> bool | None:
    """The ``foreach`` argument of an optimizer: True if all parameters are DTensors on one mesh; else None, torch's default.

    With ``foreach``, a few calls update all parameters. Torch's default for DTensors is one parameter at a time, with a dozen
    calls each, and DTensor's overhead for every call.
    """
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    return True if len(meshes) == 1 and None not in meshes else None


def _on_rank_0(job: Job, folder: Path, function: Callable[[], T]) -> T:
    """Calls a function on rank 0, and returns its result on every rank; its error is raised on every rank, too.

    Ranks do not look at the file system themselves, since they may see changes at different times.
    """
    failed = Finding(str(folder), "it could not be used", "a folder that rank 0 can write to")
    return RankAgreement(job.groups.files).first(function, failed)


def _release_at_end(stack: ExitStack, lock: Lock) -> None:
    stack.callback(lock.release)


def _tell(note: str) -> None:
    print(f"meshwright: {note}", file=sys.stderr, flush=True)


def memory(device: torch.device) -> int:
    """Bytes: on a GPU, the most that tensors have held since the last call; on a CPU, the resident memory of the process."""
    if device.type != "cpu":
        peak: int = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return peak
    try:
        with open("/proc/self/statm", encoding="ascii") as counts:
            return int(counts.read().split()[1]) * _page_size()
    except OSError:  # not Linux: only the peak can be read
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in KiB elsewhere
        return peak if sys.platform == "darwin" else peak * 1024


def _page_size() -> int:
    import resource

    return resource.getpagesize()


def _repeated(job: Job, batch: Any) -> Iterator[Any]:
    """This rank's rows of one batch, for each step again."""
    rows = mapped(lambda t: moved(t, job.groups.device), rows_of_rank(batch, job.recipe, job.rank))
    while True:
        yield rows


def _rows(data: Any) -> int:
    """Number of rows of a batch or dataset."""
    return rows_of(data) if isinstance(data, dict | tuple) else len(data)
