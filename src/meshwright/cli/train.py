"""``meshwright train``: trains with AdamW, in local workers or as a rank of torchrun; resumes from the newest checkpoint."""

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
from meshwright.cli import processes, run_folder
from meshwright.cli.files import write_whole
from meshwright.cli.inputs import Inputs
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
from meshwright.cli.run_folder import RunIdentity
from meshwright.draw.console import console
from meshwright.errors import Findings, NonFiniteError
from meshwright.plan import Plan

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from meshwright.train import loop
    from meshwright.workers.pool import LocalWorkers

_PATIENCE = 900.0  # default of --timeout, in seconds: a step, or the start of a large model, may take minutes
_DEFAULT_ROWS = 8  # least number of rows in a step if --global-batch is absent: small, so that a first try is quick
_LENGTH = 128  # tokens of a row if --seq is absent


@dataclass(frozen=True)
class RunOptions:
    """The options of a run.

    Attributes:
        steps: total number of optimizer steps, including those before a resume.
        identity: what must not change when the run resumes.
        folder: for checkpoints and metrics.
        save_every: steps from one checkpoint to the next. None: none is saved.
        keep: number of newest checkpoints to keep. None: all.
        asynchronous: whether training continues while a checkpoint is written.
        tensorboard: whether to write events for TensorBoard.
        timeout: seconds without progress after which a run is aborted.
        num_workers: processes of each rank that read rows ahead.
        observe_every: steps from one recorded timeline to the next. None: none is recorded.
    """

    steps: int
    identity: RunIdentity
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
    """The result of training on one rank.

    Attributes:
        losses: one for each step of this run, without those before a resume.
        stopped: whether SIGTERM ended the run. A checkpoint has been saved then.
        problem: the error that ended the run early.
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

    Trains on the dataset that the target's function returns as its third value;
    without one, on the target's batch in every step. The command starts a local
    process for each rank; under torchrun, each process is one rank. If you run the
    same command again, it resumes from the newest checkpoint in --out. After SIGTERM
    it saves a checkpoint and exits with code 143.
    """
    rank = int(os.environ.get("RANK", -1))
    if rank >= 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, also within a collective; each rank gets its own
    request = Request(target, mesh, plan, set_, loss, seq, ranks, device, global_batch=global_batch)
    with processes.reported_errors(quiet=rank > 0):
        folder = out or run_folder.folder_of(target)
        if fresh:
            run_folder.check_fresh(folder)
        before = None if fresh else run_folder.identity_to_resume(folder)
        inputs, rows = _inputs(request, before)
        identity = RunIdentity(target, inputs.settings, loss, rows, lr, inputs.plan.seed)
        options = RunOptions(
            steps, identity, folder, save_every, keep, async_save, tensorboard, timeout, num_workers, observe_every
        )  # fmt: skip
        _check_options(inputs, options, global_batch, before)
        if rank <= 0:
            _prepare(options, before, fresh=fresh)
        stopped = _train(inputs, options, rank)
    if stopped:
        raise typer.Exit(_code_after_sigterm())


def _inputs(request: Request, before: RunIdentity | None) -> tuple[Inputs, int]:
    """Reads the inputs of a request.

    Args:
        before: the run to resume, if there is one.

    Returns:
        The inputs, and the number of rows in a step: of ``--global-batch``, else of the run to resume, else a default.
    """
    fixed_rows = request.global_batch or (before.global_batch if before is not None else None)
    inputs = Inputs.read(
        request,
        length=_LENGTH,
        rows=lambda pieces: fixed_rows or _rows(pieces),
        check=lambda plan: _check_rows(plan, request.global_batch, before),
        rows_to_search_for=lambda target, _, pieces: None if target.dataset is None else fixed_rows or _rows(pieces),
    )
    processes.print_search_notes(inputs)
    default_rows = inputs.searched.rows if inputs.searched else _rows(inputs.pieces)
    return inputs, fixed_rows or default_rows


def _train(inputs: Inputs, options: RunOptions, rank: int) -> bool:
    """Trains with a progress display, and prints the result. Returns whether SIGTERM ended the run.

    Args:
        rank: of torchrun; -1 without a launcher: then local workers train.
    """
    title = f"{inputs.target.spec} over {inputs.plan.mesh}" if not inputs.plan.auto else inputs.target.spec
    with Live(options.steps, title, shown=rank <= 0) as live:
        started = time.monotonic()
        if rank < 0:
            outcome = _train_in_workers(inputs, options, live)
        else:
            outcome = _train_on_this_rank(inputs, options, live.tell, options.timeout)
        seconds = time.monotonic() - started
    if outcome.problem is not None:
        raise outcome.problem
    if rank <= 0:
        _print_result(options, outcome, seconds)
    return outcome.stopped


def _code_after_sigterm() -> int:
    from meshwright.train.sigterm import EXIT_CODE

    return EXIT_CODE


def _rows(pieces: int) -> int:
    """The default global batch: the smallest multiple of ``pieces`` with at least ``_DEFAULT_ROWS`` rows."""
    return pieces * math.ceil(_DEFAULT_ROWS / pieces)


def _check_rows(plan: Plan, global_batch: int | None, before: RunIdentity | None) -> None:
    """Raises PlanError if the rows of a new run do not divide over data ranks and microbatches.

    A run that resumes is not checked: it keeps its global batch, also if it has fewer ranks now.
    """
    from meshwright.runtime.rows.batches import check_global_batch

    if before is None and global_batch is not None:
        check_global_batch(global_batch, plan.mesh, plan.pieces)


def _check_options(inputs: Inputs, options: RunOptions, global_batch: int | None, before: RunIdentity | None) -> None:
    """Raises PlanError, before any process starts, if the plan, the batch or the run in the folder does not fit."""
    from meshwright.planned import make_recipe
    from meshwright.train.metrics import check_tensorboard

    if before is not None:
        run_folder.check_identity(options.folder, before, options.identity)
    if options.tensorboard:
        check_tensorboard()
    if global_batch is not None and inputs.target.dataset is None and not inputs.target.spec.startswith("hf:"):
        findings = Findings("this command")
        required = "a dataset to take rows from: the third thing that the target returns"
        where, fix = "--global-batch", "return model, batch, dataset"
        findings.add(where=where, given=f"{global_batch}, and a target without a dataset", required=required, fix=fix)
        findings.raise_if_any()
    if not inputs.plan.auto:  # auto stays only on ranks of torchrun, which search together later
        make_recipe(inputs.target.build, inputs.plan, inputs.target.batch, inputs.loss)


def _prepare(options: RunOptions, before: RunIdentity | None, *, fresh: bool) -> None:
    """Prepares the folder of a run: with ``--fresh`` renames an old run, and writes ``run.json`` for a new one."""
    if fresh and options.folder.is_dir():
        hold(options.folder, tell=lambda text: console().print(text, highlight=False, soft_wrap=True)).release()
    if fresh and (new_name := run_folder.set_aside(options.folder)) is not None:
        console().print(f"{options.folder} is now {new_name}", highlight=False)
    if before is None:
        run_folder.write_identity(options.folder, options.identity)


def _print_result(options: RunOptions, outcome: Outcome, seconds: float) -> None:
    """Prints one line about the run, and a line for each result to look at."""
    losses, done = outcome.losses, len(outcome.losses)
    if outcome.stopped:
        text = f"stopped by SIGTERM and saved in {options.folder}: the same command resumes from there"
    elif not losses:
        done_already = f"all {options.steps} steps are done already, in {options.folder}"
        text = f"{done_already}: continue with a larger --steps, or start anew with --fresh"
    else:
        up_to = "" if done == options.steps else f", to step {options.steps}"
        text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {done} step{'s' * (done > 1)}{up_to}, {seconds:.1f} s"
    console().print(text, highlight=False, soft_wrap=True)
    for name, description in _links(options.folder):
        console().print(f"{name:<12}{description}", highlight=False, soft_wrap=True)


def _links(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, description) of the newest checkpoint, of the comparisons of replicas, and of the report, which it writes."""
    from meshwright.cli.step_timelines import without_predictions
    from meshwright.draw.html.run import run_page
    from meshwright.draw.run import verdict_text
    from meshwright.train.history import history

    run = history(folder)
    if run.checkpoints:
        newest = run.checkpoints[-1]
        yield "checkpoint", f"{folder / newest.name}, {newest.problem or size_text(newest.bytes)}"
    if run.comparisons:
        yield "verdict", verdict_text(run.comparisons)
    write_whole(folder / "report.html", run_page(run, without_predictions(run)))
    yield "report", f"{folder / 'report.html'}: a browser opens it from disk"


def _train_in_workers(inputs: Inputs, options: RunOptions, live: Live) -> Outcome:
    """Trains in local workers. Each loads the target again: neither model nor dataset travels between processes."""
    from meshwright.workers.pool import WorkerError

    with processes.workers(inputs) as workers, _forwarded_sigterm(workers) as signals:
        try:
            outcomes: list[Outcome] = workers.run(
                _train_in_worker, inputs.names(), options,
                ranks=inputs.plan.mesh.size, timeout=options.timeout, on_report=live.tell,
            )  # fmt: skip
        except WorkerError:
            if signals:  # SIGTERM came before the first step, when there was nothing to save
                return Outcome([], stopped=True)
            raise
    return outcomes[0]


@contextmanager
def _forwarded_sigterm(workers: LocalWorkers) -> Iterator[list[int]]:
    """In its block, forwards SIGTERM to the workers, which then save. Yields a list that gets each received signal."""
    signals: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for pid in workers.pids():
            os.kill(pid, signal.SIGTERM)

    handler_before = signal.signal(signal.SIGTERM, forward)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, handler_before)


def _train_in_worker(names: tuple[Any, ...], options: RunOptions) -> Outcome:
    from meshwright.workers.pool import report

    return _train_on_this_rank(Inputs.from_names(*names), options, report)


def _train_on_this_rank(
    inputs: Inputs, options: RunOptions, tell: Callable[[loop.Progress | str], None], timeout: float | None = None
) -> Outcome:
    """Trains on this rank, together with the other ranks.

    Args:
        tell: called with the progress after each step, and with notes.
        timeout: seconds without progress after which a watchdog aborts. None in local workers: their pool watches them.
    """
    import torch.distributed as dist

    from meshwright.api import parallelize
    from meshwright.checkpoint.folder import newest
    from meshwright.plan.keys import CHECKPOINT
    from meshwright.train import loop

    target, identity = inputs.target, options.identity
    starts_groups = not dist.is_initialized()
    # Ranks may see different folders: rank 0's answer counts, with its recipe.
    resumes = newest(options.folder) is not None
    plan = inputs.plan.replace(weights=CHECKPOINT) if resumes else inputs.plan  # loaded weights need no random values
    job = parallelize(
        target.build, plan, batch=target.batch, loss=inputs.loss, device=inputs.device,
        timeout=2 * options.timeout,  # of collectives: longer than that of the watchdog, which is to report first
    )  # fmt: skip
    rows, data = (None, target.batch) if target.dataset is None else (identity.global_batch, target.dataset)
    record = loop.Record(
        options.folder, options.save_every, options.keep, options.asynchronous, options.tensorboard, options.observe_every
    )  # fmt: skip
    try:
        losses = loop.train(
            job, data, steps=options.steps, global_batch=rows, lr=identity.lr, seed=identity.seed, on_step=tell, on_note=tell,
            num_workers=options.num_workers, record=record, timeout=timeout,
        )  # fmt: skip
    except loop.Preempted as stopped:
        return Outcome(stopped.losses, stopped=True)
    except NonFiniteError as problem:
        return Outcome([], problem=problem)
    finally:
        if starts_groups:
            dist.destroy_process_group()
    return Outcome(losses)
