"""``rehearse``: runs the run's own code for one rank of a world of any size, without values, and returns a trace of it.

    plan ─► recipe ─► apply ─► a step ─► clip ─► optimizer        the functions that a run calls
                      │        │
                      │        └ tensors without values (FakeTensorMode), recorded by a Tracker
                      └ a world without other ranks (world.py)

So the memory, operations and collectives of a prediction can differ from a run only in what depends on the hardware.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.code_state import code_state_kept
from meshwright.deferred import Build
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.prediction.attention import attention_in_kernel
from meshwright.prediction.blocks import PrunedModel
from meshwright.prediction.copies import copies_of
from meshwright.prediction.passing import pruned
from meshwright.prediction.shapes import Shapes
from meshwright.prediction.trace import Trace
from meshwright.prediction.tracker import Tracker, followed
from meshwright.prediction.values import KnownValues
from meshwright.prediction.world import rehearsed_world
from meshwright.private import FakeTensor, FakeTensorMode, new_fake_tensor
from meshwright.recipe import Recipe
from meshwright.runtime.apply import apply, cast_type
from meshwright.runtime.coupling.paths import no_context
from meshwright.runtime.groups import make_groups
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import copied, mapped, plain, tensors_in, with_shared
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.runtime.rows.loss_weights import SPLIT
from meshwright.runtime.rows.microbatches import Microbatches, rows_of, rows_of_rank, split_batch, take_rows
from meshwright.runtime.weights.parameters import Allocated
from meshwright.spmd.one_process import one_process
from meshwright.spmd.uncompiled import UNCOMPILED

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Rehearsal:
    """One training step to rehearse: model, plan, batch, loss and optimizer.

    Attributes:
        build: a function that builds the model.
        planned: the model under its recipe.
        batch: the batch of all data ranks together.
        loss: output of the model → loss.
        optimizer: parameters → their optimizer.
        max_norm: the norm to which gradients are clipped; None: they are not clipped.
        dtype: the dtype to which parameters are cast; None: they are not cast.
        accelerator: whether the step is for an accelerator, not a CPU.
        shapes: of functions' results. Rehearsals of one model share them.
    """

    build: Build
    planned: Planned
    batch: Any
    loss: Loss
    optimizer: MakeOptimizer = torch.optim.AdamW
    max_norm: float | None = 1.0
    dtype: torch.dtype | None = None
    accelerator: bool = False
    shapes: Shapes = field(default_factory=Shapes, compare=False, repr=False)

    @property
    def recipe(self) -> Recipe:
        return self.planned.recipe

    @property
    def marked_batch(self) -> Any:
        """The batch, in which the tensors are marked that all rows share."""
        return with_shared(self.batch, self.recipe.shared_inputs)

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return rows_of(self.marked_batch)

    def passing_through(self, blocks: PrunedModel) -> Rehearsal:
        """This rehearsal with a model that passes its inputs through the blocks in ``blocks.blocks``."""
        build = pruned(self.build, blocks)
        return replace(self, build=build, planned=self.planned.of(build, blocks.recipe(self.recipe)))

    def with_all_rows(self, note: str) -> Rehearsal:
        """This rehearsal, if every data rank runs all rows. ``note``: says why, for a person."""
        recipe = replace(self.recipe, rows="whole", notes=(*self.recipe.notes, note))
        return replace(self, planned=self.planned.under(recipe))

    def shortened(self, count: int) -> Rehearsal:
        """This rehearsal with ``count`` microbatches of equal size; unchanged if the batch cannot be shortened so."""
        recipe, rows = self.recipe, self.rows
        if (
            recipe.rows == "whole"
            or recipe.microbatches <= count + 1
            or rows % (recipe.microbatches * recipe.mesh.data_size)
        ):
            return self
        batch = take_rows(self.marked_batch, 0, rows // recipe.microbatches * count)
        return replace(self, planned=self.planned.under(replace(recipe, microbatches=count)), batch=batch)


def rehearsal_of(
    build: Build,
    batch: Any,
    plan: Plan,
    loss: Loss | None,
    optimizer: MakeOptimizer,
    max_norm: float | None,
    *,
    accelerator: bool = False,
) -> Rehearsal:
    """The rehearsal of a model under a plan. For the arguments see ``Rehearsal``.

    Raises:
        PlanError: every problem of the plan.
    """
    loss, batch = loss or output_loss, plain(batch)
    dtype = torch.float64 if plan.precision == "float64" else None
    if dtype is not None:
        batch = mapped(lambda t: t.to(cast_type(t.dtype, dtype)), batch)
    with code_state_kept(build):
        build = copies_of(build, plan.seed)
        planned = Planned(build, plan, batch, loss, dtype, whole_batch=True)
    return Rehearsal(build, planned, batch, loss, optimizer, max_norm, dtype, accelerator)


@dataclass(frozen=True)
class RehearsedStep:
    """A step to rehearse.

    Attributes:
        most: it runs at most this number of microbatches; None: all.
        backward: whether it runs backwards.
        updated: whether gradients are clipped, and parameters updated.
        batch: another batch than that of the rehearsal.
    """

    most: int | None = None
    backward: bool = True
    updated: bool = True
    batch: Any = None


# The first allocates gradients and optimizer states. So the second is one of many.
TWO_STEPS = (RehearsedStep(most=1), RehearsedStep())


def rehearse(rehearsal: Rehearsal, rank: int, steps: Sequence[RehearsedStep] = TWO_STEPS) -> Trace:
    """Rehearses steps of a rank, and returns their trace.

    Raises:
        PlanError: this process is a rank of a run.
    """
    # Tensors without values have no recorded programs: without this, blocks would be recorded in each call.
    recipe = replace(rehearsal.recipe, eager=True)
    rehearsal = replace(rehearsal, planned=rehearsal.planned.under(recipe))
    # Nothing runs compiled under a dispatch mode, and torch's control flow has no rule for one of ours.
    with (
        rehearsed_world(rank, recipe.mesh.size),
        code_state_kept(rehearsal.planned.model),
        UNCOMPILED.on(),
        attention_in_kernel() if rehearsal.accelerator else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # a run shows them
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        job = job_alone(rehearsal, torch.device("cpu"), partial(_allocated_without_values, fake))
        return _trace(rehearsal, job, fake, steps)


def job_alone(rehearsal: Rehearsal, device: torch.device, allocated: Allocated) -> Job:
    """The job of this rank, in a world without other ranks. ``allocated``: makes its tensors; nothing is filled."""
    return apply(
        rehearsal.build,
        replace(rehearsal.recipe, verify=0),  # a rehearsal has no values that could be compared
        make_groups(rehearsal.recipe, device),
        loss=rehearsal.loss,
        replanner=rehearsal.planned,
        dtype=rehearsal.dtype,
        rehearsed=allocated,
    )


def _allocated_without_values(fake: FakeTensorMode, t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without values."""
    if isinstance(t, (FakeTensor, DTensor)) and not t.is_meta:
        return t  # a tied parameter that has been converted under its other name
    if not t.is_meta:
        return fake.from_tensor(t)
    with fake:
        return torch.empty_like(t, device=device)


def _trace(rehearsal: Rehearsal, job: Job, fake: FakeTensorMode, steps: Sequence[RehearsedStep]) -> Trace:
    """Runs steps of this rank under a ``Tracker``, and returns the trace."""
    rows, values = RankRows(rehearsal, job.rank), KnownValues(fake, rehearsal.shapes)
    # Rows that have values are recorded with them, since the model may branch on them.
    modes = (fake, values) if rows.without_values(fake) else ()
    with one_process(), ExitStack() as recording:
        for mode in modes:
            recording.enter_context(mode)
        for piece in rows.microbatches().batches:
            job.runner.executor.record(piece)
    tracker = Tracker(job.module, lambda: job.runner.executor.action)
    with fake, values, followed(tracker):
        tracker.mark_persistent(
            {"parameters": job.parameters(), "buffers": job.module.buffers(), "batch": rows.between_steps}
        )
        optimizer = rehearsal.optimizer(job.parameters())
        for number, step in enumerate(steps):
            tracker.begin(f"step {number}")
            if step.batch is not None:
                rows = RankRows(replace(rehearsal, batch=step.batch), job.rank)
                rows.without_values(fake)
                tracker.mark_persistent({"batch": rows.between_steps})
            run_microbatches(rehearsal, job, rows.microbatches(step.most), backward=step.backward)
            _update(rehearsal, job, optimizer if step.updated else None, tracker)
        with tracker.paused():
            edges = job.runner.executor.edges(rows.microbatches().batches)
        ran_whole = tuple((f.function, f.module, f.line) for f in job.ledger.fallbacks)
        return replace(tracker.close(), assumed=tuple(values.assumed), edges=edges, ran_whole=ran_whole)


class RankRows:
    """The rows of the batch on one rank, divided into microbatches as ``Division`` divides them.

    A rehearsal does not try how rows combine into the loss. If the recipe does not say it, the rows are split.
    """

    def __init__(self, rehearsal: Rehearsal, rank: int) -> None:
        self._recipe, data = rehearsal.recipe, rehearsal.recipe.mesh.data_size
        self._every_rank_has_all = self._recipe.rows == "whole"
        self._all = rehearsal.marked_batch
        self._rank_rows = copied(rows_of_rank(rehearsal.batch, self._recipe, rank))
        divided = data * self._recipe.microbatches > 1 and not self._every_rank_has_all
        self._one_row = copied(take_rows(self._rank_rows, 0, 1)) if divided else ()  # for microbatches without rows

    @property
    def between_steps(self) -> list[Tensor]:
        """The tensors of the batch that a rank holds between steps."""
        return tensors_in([self._rank_rows, self._one_row])

    def without_values(self, fake: FakeTensorMode) -> bool:
        """If a tensor of the batch is on meta, makes all of them fake tensors on the CPU. Returns whether it did."""
        if not any(t.is_meta for t in self.between_steps):
            return False
        shared, make_fake = self._recipe.shared_inputs, partial(_without_values, fake)
        self._all, self._rank_rows = (
            with_shared(mapped(make_fake, batch), shared) for batch in (self._all, self._rank_rows)
        )
        self._one_row = mapped(make_fake, self._one_row)
        return True

    def microbatches(self, most: int | None = None) -> Microbatches:
        """The microbatches that the rank runs in a step. ``most``: the largest number of them; None: all."""
        data, rows = self._recipe.mesh.data_size, rows_of(self._all)
        if self._every_rank_has_all:
            return Microbatches([copied(self._all) if data > 1 else self._rank_rows], [1.0], [None], copies=data)
        batches = list(split_batch(self._rank_rows, self._recipe.microbatches))[:most]
        return Microbatches(batches, [rows_of(piece) / rows for piece in batches], [None] * len(batches))


def run_microbatches(rehearsal: Rehearsal, job: Job, microbatches: Microbatches, *, backward: bool = True) -> None:
    """Runs forwards and backwards as ``Job.step`` does after its trial of rows. Frees the microbatches at its end."""
    with one_process():
        job.runner.sharded_model.reshard()
        job.runner.losses(microbatches, no_context, once=rehearsal.recipe.rows != SPLIT, backward=backward)


def _update(rehearsal: Rehearsal, job: Job, optimizer: torch.optim.Optimizer | None, tracker: Tracker) -> None:
    """Clips gradients, updates parameters and zeroes gradients, as a training loop does. Without an optimizer, only zeroes."""
    tracker.mark_persistent({"gradients": [p.grad for p in job.parameters() if p.grad is not None]})
    if optimizer is None:
        job.module.zero_grad()
        return
    if rehearsal.max_norm is not None:
        tracker.begin("clip")
        job.clip_grad_norm_(rehearsal.max_norm)
    tracker.begin("optimizer")
    optimizer.step()
    tracker.mark_persistent({"optimizer": [t for state in optimizer.state.values() for t in tensors_in(state)]})
    tracker.begin("end")
    optimizer.zero_grad()


def _without_values(fake: FakeTensorMode, t: Tensor) -> Tensor:
    return new_fake_tensor(fake, t.size(), t.stride(), t.dtype)
