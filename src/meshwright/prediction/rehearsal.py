"""``rehearse``: the run's own code for one rank of a world of any size, without values: what it does, in order.

    plan ─► recipe ─► apply ─► a step ─► clip ─► optimizer        the same functions as in a run
                      │        │
                      │        └ tensors without values (FakeTensorMode), followed by a Tracker
                      └ a world without other ranks (world.py)

So what a prediction says of memory, operations and collectives can differ from a run only where hardware enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.api import Planned
from meshwright.prediction.trace import Trace
from meshwright.prediction.tracker import Tracker, followed
from meshwright.prediction.values import KnownValues
from meshwright.prediction.world import rehearsed_world
from meshwright.private import FakeTensor, FakeTensorMode
from meshwright.recipe import Recipe
from meshwright.runtime.apply import apply
from meshwright.runtime.coupling.paths import unwatched
from meshwright.runtime.groups import make_groups
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import copied, mapped, tensors_in
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import Pieces, microbatches, rows_of, take_rows
from meshwright.spmd.one_process import one_process
from meshwright.submesh import bounds

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
STEPS = 2  # in the first one gradients and the optimizer's state come into being


@dataclass(frozen=True)
class Rehearsal:
    """What is rehearsed.

    Attributes:
        build: makes the model.
        planned: the model under its recipe.
        batch: of all data ranks together.
        optimizer: parameters → their optimizer.
        max_norm: what gradients are clipped to; None: they are not clipped.
    """

    build: Callable[[], nn.Module]
    planned: Planned
    batch: Any
    loss: Loss
    optimizer: MakeOptimizer = torch.optim.AdamW
    max_norm: float | None = 1.0
    dtype: torch.dtype | None = None

    @property
    def recipe(self) -> Recipe:
        return self.planned.recipe


def rehearse(rehearsal: Rehearsal, rank: int) -> Trace:
    """What a rank does in a run's second step, when gradients and optimizer have their memory.

    Raises:
        PlanError: this process is a rank of a run.
    """
    recipe = rehearsal.recipe
    with rehearsed_world(rank, recipe.mesh.size):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        job = _job(rehearsal, fake)
        return _steps(rehearsal, job, fake)


def _job(rehearsal: Rehearsal, fake: FakeTensorMode) -> Job:
    """The job of this rank, its parameters without values."""

    def without_values(t: Tensor, device: torch.device) -> Tensor:
        if isinstance(t, (FakeTensor, DTensor)) and not t.is_meta:
            return t  # a tied one, at its second place
        if not t.is_meta:
            return fake.from_tensor(t)
        with fake:
            return torch.empty_like(t, device=device)

    groups = make_groups(rehearsal.recipe, torch.device("cpu"))
    return apply(
        rehearsal.build,
        replace(rehearsal.recipe, verify=0),  # what compares values has none to compare
        groups,
        loss=rehearsal.loss,
        replanner=rehearsal.planned,
        dtype=rehearsal.dtype,
        rehearsed=without_values,
    )


def _steps(rehearsal: Rehearsal, job: Job, fake: FakeTensorMode) -> Trace:
    recipe, runner = rehearsal.recipe, job.runner
    mesh = recipe.mesh
    index = mesh.data_index(job.rank)
    rows = copied(take_rows(rehearsal.batch, *bounds(rows_of(rehearsal.batch), mesh.data_size)[index]))
    real = list(microbatches(rows, recipe.microbatches))
    with one_process():
        for piece in real:
            runner.executor.record(piece)
    batch = rows if not any(t.is_meta for t in tensors_in(rows)) else mapped(partial(_without_values, fake), rows)
    tracker = Tracker(job.module, lambda: runner.executor.action)
    values = KnownValues(fake)
    with fake, values, followed(tracker):
        tracker.keep(
            {
                "parameters": list(job.parameters()),
                "buffers": list(job.module.buffers()),
                "batch": tensors_in(batch),
            }
        )
        optimizer = rehearsal.optimizer(job.parameters())
        for step in range(STEPS):
            tracker.begin(f"step {step}")
            pieces = list(microbatches(batch, recipe.microbatches))
            scale = [rows_of(p) / rows_of(rehearsal.batch) for p in pieces]
            with one_process():
                runner.held.reshard()
                runner.losses(Pieces(pieces, scale, [None] * len(pieces)), unwatched, once=True, backward=True)
            tracker.keep({"gradients": [p.grad for p in job.parameters() if p.grad is not None]})
            if rehearsal.max_norm is not None:
                tracker.begin("clip")
                _clip(job, rehearsal.max_norm)
            tracker.begin("optimizer")
            optimizer.step()
            tracker.keep({"optimizer": [t for state in optimizer.state.values() for t in tensors_in(state)]})
            tracker.begin("end")
            optimizer.zero_grad()
        return replace(tracker.close(), assumed=tuple(values.assumed))


def _without_values(fake: FakeTensorMode, t: Tensor) -> Tensor:
    with fake:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")


def _clip(job: Job, max_norm: float) -> None:
    job.clip_grad_norm_(max_norm)
