"""``meshwright train``: a few steps of AdamW, in local workers or as one rank of torchrun."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import processes
from meshwright.cli.bar import Bar
from meshwright.cli.given import Given
from meshwright.cli.options import (
    DeviceOption,
    LossOption,
    MeshOption,
    PlanOption,
    SeqOption,
    SetOption,
    TargetArgument,
)  # fmt: skip
from meshwright.draw.terminal import console
from meshwright.errors import Findings

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from meshwright.run import loop

_PATIENCE = 900.0  # seconds that a step, or the start of a large model, may take


@dataclass(frozen=True)
class Course:
    """How to train."""

    steps: int
    global_batch: int
    lr: float


def train(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps", min=1)] = 20,
    global_batch: Annotated[int | None, typer.Option(help="Rows a step, over all ranks", min=1)] = None,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate")] = 3e-4,
    loss: LossOption = None,
    device: DeviceOption = None,
    seq: SeqOption = None,
) -> None:
    """Train with AdamW, and tell loss, speed and memory.

    The rows are the target's dataset, the third thing that its function returns;
    else its batch, again and again. Run alone it starts a local process a rank;
    under torchrun each process is one rank.
    """
    rank = int(os.environ.get("RANK", -1))
    with processes.told(quiet=rank > 0):
        given = Given.read(
            target,
            mesh,
            plan,
            set_,
            loss,
            device,
            seq=seq,
            length=128,
            rows=lambda pieces: global_batch or _rows(pieces),
        )
        course = Course(steps, global_batch or _rows(given.pieces), lr)
        _check_course(given, course, global_batch)
        with Bar(steps, shown=rank <= 0) as bar:
            started = time.monotonic()
            losses = _train_alone(given, course, bar) if rank < 0 else _train_here(given, course, bar.tell)
            seconds = time.monotonic() - started
        if rank <= 0:
            console().print(
                f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {steps} steps, {seconds:.1f} s", highlight=False
            )


def _rows(pieces: int) -> int:
    """A small global batch that divides."""
    return pieces * math.ceil(8 / pieces)


def _check_course(given: Given, course: Course, global_batch: int | None) -> None:
    """Raises PlanError, before anything starts, where the plan or the batch does not fit."""
    from meshwright.api import make_recipe
    from meshwright.run.batches import check_global_batch

    check_global_batch(course.global_batch, given.plan.mesh, given.plan.pieces)
    if global_batch is not None and given.target.dataset is None and not given.target.spec.startswith("hf:"):
        findings = Findings("this command")
        required = "a dataset to take rows from: the third thing that the target returns"
        where, fix = "--global-batch", "return model, batch, dataset"
        findings.add(where=where, given=f"{global_batch}, and a target without a dataset", required=required, fix=fix)
        findings.raise_if_any()
    make_recipe(given.target.build, given.plan, given.target.batch, given.loss)


def _train_alone(given: Given, course: Course, bar: Bar) -> list[float]:
    """In local workers, which find the target anew: neither model nor dataset travels."""
    with processes.workers(given) as workers:
        found: list[list[float]] = workers.run(
            _train_in_worker, given.named(), course,
            ranks=given.plan.mesh.size, timeout=_PATIENCE, on_report=bar.tell,
        )  # fmt: skip
    return found[0]


def _train_in_worker(named: tuple[Any, ...], course: Course) -> list[float]:
    from meshwright.run.workers import report

    return _train_here(Given.from_names(*named), course, report)


def _train_here(given: Given, course: Course, tell: Callable[[loop.Progress], None]) -> list[float]:
    """On this rank, together with the others."""
    import torch.distributed as dist

    from meshwright.api import parallelize
    from meshwright.run import loop

    target = given.target
    started = not dist.is_initialized()
    job = parallelize(target.build, given.plan, batch=target.batch, loss=given.loss, device=given.device)
    rows, data = (None, target.batch) if target.dataset is None else (course.global_batch, target.dataset)
    try:
        return loop.train(
            job, data, steps=course.steps, global_batch=rows, lr=course.lr, seed=given.plan.seed, on_step=tell
        )
    finally:
        if started:
            dist.destroy_process_group()
