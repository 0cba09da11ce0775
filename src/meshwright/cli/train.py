"""``meshwright train``: AdamW, in local workers or as one rank of torchrun; resumed where it stopped."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from meshwright.amounts import size_text
from meshwright.checkpoint.lock import hold
from meshwright.cli import course as courses
from meshwright.cli import processes
from meshwright.cli.course import Same
from meshwright.cli.files import write_whole
from meshwright.cli.given import Given
from meshwright.cli.live import Live
from meshwright.cli.options import (
    AsyncSaveOption,
    DeviceOption,
    FreshOption,
    GlobalBatchOption,
    KeepOption,
    LossOption,
    MeshOption,
    NumWorkersOption,
    ObserveEveryOption,
    OutOption,
    PlanOption,
    RanksOption,
    RateOption,
    SaveEveryOption,
    SeqOption,
    SetOption,
    StepsOption,
    TargetArgument,
    TensorboardOption,
    TimeoutOption,
)  # fmt: skip
from meshwright.cli.request import Request
from meshwright.draw.console import console
from meshwright.errors import Findings, NonFiniteError
from meshwright.plan import Plan

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from meshwright.train import loop
    from meshwright.workers.pool import LocalWorkers

_PATIENCE = 900.0  # seconds that a step, or the start of a large model, may take


@dataclass(frozen=True)
class Course:
    """How to train, and where that is kept."""

    steps: int
    same: Same
    folder: Path
    save_every: int | None
    keep: int | None
    asynchronous: bool
    tensorboard: bool
    timeout: float
    num_workers: int
    observe_every: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How training on a rank ended.

    Attributes:
        losses: of the steps that were done.
        stopped: whether it was told to stop, and has saved.
        problem: what ended it early.
    """

    losses: list[float]
    stopped: bool = False
    problem: NonFiniteError | None = None


def train(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    steps: StepsOption = 20,
    global_batch: GlobalBatchOption = None,
    lr: RateOption = 3e-4,
    out: OutOption = None,
    save_every: SaveEveryOption = None,
    keep: KeepOption = None,
    async_save: AsyncSaveOption = False,
    fresh: FreshOption = False,
    tensorboard: TensorboardOption = False,
    observe_every: ObserveEveryOption = None,
    timeout: TimeoutOption = _PATIENCE,
    num_workers: NumWorkersOption = 0,
    loss: LossOption = None,
    device: DeviceOption = None,
    seq: SeqOption = None,
    ranks: RanksOption = None,
) -> None:
    """Train with AdamW, report loss, speed and memory, and save checkpoints.

    The data is the dataset that the target's function returns as its third value;
    without one, its batch is used in every step. The command starts a local process
    for each rank; under torchrun, each process is one rank. If you run the same
    command again, it resumes from the newest checkpoint in --out. After SIGTERM it
    saves a checkpoint and exits with code 143.
    """
    rank = int(os.environ.get("RANK", -1))
    if rank >= 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, also in a collective; the others get theirs
    request = Request(target, mesh, plan, set_, loss, seq, ranks, device, global_batch=global_batch)
    with processes.told(quiet=rank > 0):
        folder = out or courses.folder_of(target)
        if fresh:
            courses.check_fresh(folder)
        before = None if fresh else courses.begun(folder)
        given, rows = _given(request, before)
        same = Same(target, given.settings, loss, rows, lr, given.plan.seed)
        course = Course(
            steps, same, folder, save_every, keep, async_save, tensorboard, timeout, num_workers, observe_every
        )  # fmt: skip
        _check_course(given, course, global_batch, before)
        if rank <= 0:
            _prepare(course, before, fresh=fresh)
        stopped = _trained(given, course, rank)
    if stopped:
        raise typer.Exit(_code_after_sigterm())


def _given(request: Request, before: Same | None) -> tuple[Given, int]:
    """What the request names, and the rows of a step: those that it says, those of the run before, or a few for each rank."""
    said = request.global_batch or (before.global_batch if before is not None else None)
    given = Given.read(
        request, length=128, rows=lambda pieces: said or _rows(pieces),
        check=lambda plan: _check_rows(plan, request.global_batch, before),
        whole=lambda target, settings, pieces: None if target.dataset is None else said or _rows(pieces),
    )  # fmt: skip
    processes.tell_found(given)
    return given, said or (given.searched.rows if given.searched else _rows(given.pieces))


def _trained(given: Given, course: Course, rank: int) -> bool:
    """Trains, and tells of it. Whether it was told to stop."""
    title = f"{given.target.spec} over {given.plan.mesh}" if not given.plan.auto else given.target.spec
    with Live(course.steps, title, shown=rank <= 0) as live:
        started = time.monotonic()
        if rank < 0:
            outcome = _train_alone(given, course, live)
        else:
            outcome = _train_here(given, course, live.tell, course.timeout)
        seconds = time.monotonic() - started
    if outcome.problem is not None:
        raise outcome.problem
    if rank <= 0:
        _tell(course, outcome, seconds)
    return outcome.stopped


def _code_after_sigterm() -> int:
    from meshwright.train.sigterm import EXIT_CODE

    return EXIT_CODE


def _rows(pieces: int) -> int:
    """A small global batch that divides."""
    return pieces * math.ceil(8 / pieces)


def _check_rows(plan: Plan, global_batch: int | None, before: Same | None) -> None:
    """Raises PlanError if a new run's rows a step do not divide; one that goes on with fewer machines need not divide them."""
    from meshwright.runtime.rows.batches import check_global_batch

    if before is None and global_batch is not None:
        check_global_batch(global_batch, plan.mesh, plan.pieces)


def _check_course(given: Given, course: Course, global_batch: int | None, before: Same | None) -> None:
    """Raises PlanError, before anything starts, where the plan, the batch or the folder does not fit."""
    from meshwright.planned import make_recipe
    from meshwright.train.metrics import check_tensorboard

    if before is not None:
        courses.check_same(course.folder, before, course.same)
    if course.tensorboard:
        check_tensorboard()
    if global_batch is not None and given.target.dataset is None and not given.target.spec.startswith("hf:"):
        findings = Findings("this command")
        required = "a dataset to take rows from: the third thing that the target returns"
        where, fix = "--global-batch", "return model, batch, dataset"
        findings.add(where=where, given=f"{global_batch}, and a target without a dataset", required=required, fix=fix)
        findings.raise_if_any()
    if not given.plan.auto:  # a rank of torchrun: it is found when all ranks have met
        make_recipe(given.target.build, given.plan, given.target.batch, given.loss)


def _prepare(course: Course, before: Same | None, *, fresh: bool) -> None:
    """The folder, and what a person should know of it."""
    if fresh and course.folder.is_dir():
        hold(course.folder, tell=lambda text: console().print(text, highlight=False, soft_wrap=True)).release()
    if fresh and (other := courses.set_aside(course.folder)) is not None:
        console().print(f"{course.folder} is now {other}", highlight=False)
    if before is None:
        courses.write(course.folder, course.same)


def _tell(course: Course, outcome: Outcome, seconds: float) -> None:
    """What was done, in a line."""
    losses, done = outcome.losses, len(outcome.losses)
    if outcome.stopped:
        text = f"stopped by SIGTERM and saved in {course.folder}: the same command resumes from there"
    elif not losses:
        text = f"all {course.steps} steps are done already, in {course.folder}: more with --steps, anew with --fresh"
    else:
        of = "" if done == course.steps else f", to step {course.steps}"
        text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {done} step{'s' * (done > 1)}{of}, {seconds:.1f} s"
    console().print(text, highlight=False, soft_wrap=True)
    for name, told in _links(course.folder):
        console().print(f"{name:<12}{told}", highlight=False, soft_wrap=True)


def _links(folder: Path) -> Iterator[tuple[str, str]]:
    """Where to look: the newest checkpoint, what came of comparing ranks, the report, which is written for it."""
    from meshwright.cli.foretold import not_foretold
    from meshwright.draw.html.run import run_page
    from meshwright.draw.run import verdict_text
    from meshwright.train.history import history

    run = history(folder)
    if run.checkpoints:
        last = run.checkpoints[-1]
        yield "checkpoint", f"{folder / last.name}, {last.problem or size_text(last.bytes)}"
    if run.comparisons:
        yield "verdict", verdict_text(run.comparisons)
    write_whole(folder / "report.html", run_page(run, not_foretold(run)))
    yield "report", f"{folder / 'report.html'}: a browser opens it from disk"


def _train_alone(given: Given, course: Course, live: Live) -> Outcome:
    """In local workers, which find the target anew: neither model nor dataset travels."""
    from meshwright.workers.pool import WorkerError

    with processes.workers(given) as workers, _passed_on(workers) as told:
        try:
            outcomes: list[Outcome] = workers.run(
                _train_in_worker, given.named(), course,
                ranks=given.plan.mesh.size, timeout=course.timeout, on_report=live.tell,
            )  # fmt: skip
        except WorkerError:
            if told:  # before the first step there is nothing to save
                return Outcome([], stopped=True)
            raise
    return outcomes[0]


@contextmanager
def _passed_on(workers: LocalWorkers) -> Iterator[list[int]]:
    """SIGTERM is given to the workers, which save; what came is noted."""
    told: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.append(number)
        for pid in workers.pids():
            os.kill(pid, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _train_in_worker(named: tuple[Any, ...], course: Course) -> Outcome:
    from meshwright.workers.pool import report

    return _train_here(Given.from_names(*named), course, report)


def _train_here(
    given: Given, course: Course, tell: Callable[[loop.Progress | str], None], timeout: float | None = None
) -> Outcome:
    """On this rank, together with the others. ``timeout``: of a watch; local workers are watched by their pool."""
    import torch.distributed as dist

    from meshwright.api import parallelize
    from meshwright.checkpoint.folder import newest
    from meshwright.plan.keys import CHECKPOINT
    from meshwright.train import loop

    target, same = given.target, course.same
    started = not dist.is_initialized()
    resumes = newest(course.folder) is not None  # rank 0's answer counts, as its recipe does
    plan = given.plan.replace(weights=CHECKPOINT) if resumes else given.plan  # what is loaded need not be drawn
    job = parallelize(
        target.build, plan, batch=target.batch, loss=given.loss, device=given.device,
        timeout=2 * course.timeout,  # whoever watches is to report first, and not a collective that gives up
    )  # fmt: skip
    rows, data = (None, target.batch) if target.dataset is None else (same.global_batch, target.dataset)
    record = loop.Record(
        course.folder, course.save_every, course.keep, course.asynchronous, course.tensorboard, course.observe_every
    )  # fmt: skip
    try:
        losses = loop.train(
            job, data, steps=course.steps, global_batch=rows, lr=same.lr, seed=same.seed, on_step=tell, on_note=tell,
            num_workers=course.num_workers, record=record, timeout=timeout,
        )  # fmt: skip
    except loop.Preempted as stopped:
        return Outcome(stopped.losses, stopped=True)
    except NonFiniteError as problem:
        return Outcome([], problem=problem)
    finally:
        if started:
            dist.destroy_process_group()
    return Outcome(losses)
