"""``Job``: a model that is sharded over the mesh, ready to train. ``parallelize`` returns it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.generators import Generators
from meshwright.mismatch import Mismatch
from meshwright.recipe import ParameterRecipe
from meshwright.replay.program import LocalProgram
from meshwright.replay.replayed import LocalPrograms
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.division import Division
from meshwright.runtime.guard import Guard
from meshwright.runtime.job_end import JobEnd
from meshwright.runtime.mismatches import mismatches
from meshwright.runtime.observed import Observer, observing
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.rows.batches import Batches
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.runner import Runner
from meshwright.runtime.sharded_model import ShardedModel
from meshwright.runtime.step_agreement import StepAgreement
from meshwright.runtime.steps import Steps
from meshwright.runtime.weights.clip import Clipping
from meshwright.runtime.weights.copied_views import write_through
from meshwright.runtime.weights.coupled_updates import refuse_coupled_updates
from meshwright.runtime.weights.draws import draw_whole
from meshwright.runtime.weights.fsdp import holds_dtensors
from meshwright.runtime.weights.partial_gradients import scaled_together
from meshwright.runtime.weights.partial_reads import refuse_partial_reads
from meshwright.runtime.weights.redistribution import redistribute_by_recipe
from meshwright.runtime.weights.reductions import reduce_whole
from meshwright.spmd.comm import Ledger
from meshwright.watch.timer import CommunicationTimer

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers
    from meshwright.checkpoint.load import LoadResult
    from meshwright.checkpoint.pretrained import Pretrained
    from meshwright.checkpoint.save import Saving


class Job:
    """A model over a mesh. ``parallelize`` creates it. Every method must be called on every rank, in the same order.

    Attributes:
        module: the model, with sharded parameters, under the names of the model on one device.
        recipe: every decision.
        parts: how many parts of checkpoint files this rank has read or written so far, asynchronously too.
        ledger: counts the collectives of tensor parallelism (calls, bytes) and its fallbacks, since the start.
        random: the generators of this rank.
        guard: compares replicas every so many steps.
    """

    def __init__(
        self,
        runner: Runner,
        ledger: Ledger,
        counter: LabelCounter | None,
        random: Generators,
        programs: LocalPrograms | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.module, self.recipe, self.groups = runner.module, runner.recipe, runner.groups
        self.ledger, self.random, self._programs = ledger, random, programs
        self.guard = Guard(self.module, self.recipe, self.groups, ledger, self.recipe.verify)
        self._runner, self._sharded_model = runner, runner.sharded_model
        self._division = Division(runner, counter, random)
        agreement = StepAgreement(self.recipe, self.groups, random, runner.switches)
        self._end = JobEnd(self.groups)
        self._steps = Steps(runner, self._division, self.guard, agreement, self._end)
        self._checkpoints = Checkpoints(self._sharded_model, self._division, self.guard, random)
        self._clipping = Clipping(self.module, self.recipe, self.groups, runner.waiting)
        self._optimizer_notes: list[str] = []
        self._start_notes = tuple(notes)
        # The model, and so its parameters, may outlive the job.
        refuse_partial_reads(self.module)
        if holds_dtensors(self.recipe):
            write_through(self.module)
            draw_whole(self.module)
            reduce_whole(self.module)
        redistribute_by_recipe(self.module, self.recipe)
        if self.recipe.in_parts:
            scaled_together(self._sharded_model, ShardedModel.parameters, self.groups.device)
            refuse_coupled_updates(self._sharded_model, ShardedModel.parameters, self._optimizer_notes.append)
        self.parts = 0
        runner.switches.note()  # hooks on modules so far are this library's

    # --- training ---------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """Forward and backward over all microbatches of this rank's rows; gradients are added to ``.grad``.

        Returns:
            The mean loss over the global batch, a tensor without dims, the same on every rank.

        Raises:
            PlanError: gradients are off, or ranks make different calls.
            ReplicaError: on every rank, in steps that compare ranks (``verify`` in the plan): replicas are not bitwise equal.
            RowsError: on every rank: the values of this step have shown that its rows cannot be divided.
            RankError: another rank failed within the step, or has ended: with its error. What this rank itself meets is raised
                as it is. Either ends the job, on all ranks.
        """
        return self._steps.run(batch, backward=True)

    def finish_step(self) -> None:
        """Checks that the loss of the last step is finite, for which the host waits for its device. Collective.

        On a CPU each ``step`` ends with this check. On a GPU it is made in the next step, or in ``save``, so that the
        host does not wait. A loop that reads the loss before ``optimizer.step()`` waits there anyway, and should call
        this there.

        Raises:
            RowsError: on every rank: the loss is not finite, because its rows were divided.
        """
        with self._end.within(self._steps.number):
            self._division.finish_step()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """The mean loss over the global batch, without gradients. ``batch``: this rank's rows."""
        return self._steps.run(batch, backward=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's rows, as full tensors. With a pipeline: on the ranks of the last stage, None
        on others, and without gradients. What the forward writes to tensors among its arguments, or leaves in lists, dicts and
        plain objects among them (a cache of keys and values), is there on all ranks afterwards.

        Raises:
            PlanError: with a pipeline or branches, the forward changes such an object otherwise (it removes from a list).
        """
        return self._steps.output(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients to a global 2-norm of at most ``max_norm``; returns the norm before."""
        with self._runner.stages.phase("clip"), self._end.within(self._steps.number):
            return self._clipping.clip(max_norm)

    def grad_norm(self) -> Tensor:
        """The global 2-norm of all gradients."""
        with self._end.within(self._steps.number):
            return self._clipping.norm()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, for an optimizer; if it has none, one without elements, as optimizers refuse an
        empty list."""
        return self._sharded_model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of each parameter of this rank, by the names of the model on one device."""
        return self._sharded_model.named_parameters()

    def batches(
        self, dataset: Any, global_batch: int, *, seed: int = 0, epochs: int | None = 1, shuffle: bool = True,
        drop_last: bool = False, start: int = 0, uneven: bool = False, num_workers: int = 0,
    ) -> Batches:  # fmt: skip
        """This rank's rows of each global batch; the order of rows is the same in every layout.

        Args:
            dataset: with ``len`` and ``dataset[i]``, one row: a dict (or tuple) of tensors or numbers; or a dict (or
                tuple) of tensors, whose dim 0 are the rows.
            global_batch: rows a step, over all ranks.
            seed: of the order, which differs from epoch to epoch.
            epochs: None goes on without end.
            drop_last: leave out a last batch that is short.
            start: batches to skip, to go on where another run stopped.
            uneven: rows need not divide: some ranks, or microbatches, have one more than others. The mean is right all the
                same, and some ranks wait for others.
            num_workers: how many processes of this rank read rows ahead of the steps (``torch.utils.data.DataLoader``); 0:
                rows are read between steps. What the dataset draws from torch's, Python's or NumPy's generators for a row
                follows from seed, epoch and row: the same in every layout, with any number of workers, after a resume.

        Raises:
            PlanError: ``global_batch`` does not divide by data ranks × microbatches.
        """
        return Batches(
            dataset, global_batch, mesh=self.recipe.mesh, rank=self.rank, microbatches=self.recipe.microbatches,
            seed=seed, epochs=epochs, shuffle=shuffle, drop_last=drop_last, start=start, device=self.groups.device,
            uneven=uneven, num_workers=num_workers, reading=lambda: self._end.within(self._steps.number),
        )  # fmt: skip

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(
        self, folder: str | os.PathLike[str], optimizer: Optimizers = None, *, step: int, scheduler: Any = None,
        data: Any = None, extra: Any = None, keep: int | None = None, wait: bool = True,
    ) -> Saving:  # fmt: skip
        """Saves a checkpoint from which training can resume in any layout: ``folder/step-00000100``, which exists only
        once it is complete.

        Every rank writes its own shards (``torch.distributed.checkpoint``), under the names of the model on one device;
        none needs memory for more than its shards and one tensor. The states of generators, the plan and the recipe are
        saved too.

        Args:
            folder: the folder of the run's checkpoints, on a file system that all ranks share.
            optimizer: one, or several with different parameters.
            step: the number of optimizer steps that were done.
            scheduler: of learning rates: anything with ``state_dict()``.
            data: the position in the data: what ``batches`` returned, or anything with ``state_dict()``.
            extra: other values that ``load`` returns: tensors, numbers, text, and lists, tuples and dicts of them; rank 0's.
            keep: how many of the newest checkpoints stay in the folder; None: all.
            wait: False copies the state, and writes it while training goes on. Only one save runs at a time: the next save or
                load waits for it.

        Raises:
            CheckpointError: on every rank: some rank failed to save, for whatever reason, and the unfinished checkpoint was
                removed; or the checkpoint could not be loaded again.
        """
        self._end.check()
        return self._checkpoints.save(
            folder, optimizer, self.count_file,
            step=step, scheduler=scheduler, data=data, extra=extra, keep=keep, wait=wait,
        )  # fmt: skip

    def saved(self) -> None:
        """Waits until a checkpoint that is still being written is complete.

        Raises:
            CheckpointError: writing it failed.
        """
        self._checkpoints.saved()

    def load(
        self, path: str | os.PathLike[str], optimizer: Optimizers = None, *, scheduler: Any = None, data: Any = None,
        verify: bool = True, or_before: bool = False,
    ) -> LoadResult:  # fmt: skip
        """Resumes from a checkpoint of any layout: each rank reads its own slices.

        Args:
            path: a checkpoint; or a folder of checkpoints, of which the newest is loaded.
            optimizer: like the one given to ``save``, created in the same way.
            scheduler: likewise.
            data: likewise.
            verify: first read the whole checkpoint, each rank a part, and compare it with its checksums.
            or_before: if the newest checkpoint in a folder is damaged, load the one before, and say so in the notes of
                the result; else that is an error. For runs that are restarted without a person.

        Raises:
            CheckpointError: on every rank: it is damaged (with file and tensor), or belongs to another model; then nothing was
                changed. Or some rank could not read what was readable before, or an object refused its state; then some values
                are those of the checkpoint.
        """
        self._end.check()
        loaded = self._checkpoints.load(
            path, optimizer, self.count_file, scheduler=scheduler, data=data, verify=verify, or_before=or_before
        )
        self._steps.resume(loaded.step)
        self._steps.take_weights()
        return loaded

    def load_pretrained(self, folder: str | os.PathLike[str], *, strict: bool = True) -> Pretrained:
        """Fills parameters and persistent buffers from safetensors. Each rank reads only its own slices.

        Args:
            folder: has ``model.safetensors``, or ``model.safetensors.index.json`` and its files; or a single file. Names are
                those of the model on one device; a base model's prefix may be missing or superfluous; renames and
                conversions of transformers are applied. Values are cast to the parameters' dtypes.
            strict: False: parameters that the folder lacks (a new head) stay as they are, and names that the model lacks are
                skipped.

        Returns:
            Which names were missing, and which were not expected.

        Raises:
            PlanError: all problems at once, before anything is changed; on every rank.
        """
        self._end.check()
        loaded = self._checkpoints.load_pretrained(folder, self.count_file, strict=strict)
        self._steps.take_weights(loaded.missing)
        return loaded

    def count_file(self) -> None:
        """Counts a part of a file that was read or written, which the watchdog takes as progress of this rank."""
        self.parts += 1

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Calls of ``step`` so far, the running one included."""
        return self._steps.count

    @property
    def steps_before(self) -> int:
        """Optimizer steps of the loaded checkpoint minus the calls of ``step`` before it was loaded."""
        return self._steps.before

    @property
    def pipeline(self) -> Executor | None:
        """Runs this rank's stages, and has the times and transfers of the last step; None if each forward runs as a whole."""
        return self._runner.pipeline

    @property
    def rows(self) -> str:
        """How rows of a batch combine into its loss; ``auto`` before the first step."""
        return self._division.rows

    @property
    def runner(self) -> Runner:
        """Runs the forwards and backwards of this rank."""
        return self._runner

    @property
    def waiting(self) -> CommunicationTimer:
        """Measures how long this rank waits for others."""
        return self._runner.waiting

    @property
    def rank(self) -> int:
        """This process's rank, as the plan's mesh counts them."""
        return self.groups.rank

    @property
    def notes(self) -> tuple[str, ...]:
        """The recipe's notes, and what was found out since planning."""
        programs = self._programs.notes if self._programs is not None else ()
        return (*self.recipe.notes, *self._start_notes, *self._steps.notes, *programs, *self._optimizer_notes)

    # --- inspection -------------------------------------------------------------------------------------------------

    @contextmanager
    def observe(self, optimizer: Optimizers = None) -> Iterator[Observer]:
        """Records one step: when each action, transfer, collective, the clipping and the optimizer began and ended.

            with job.observe(optimizer) as seen:
                loss = job.step(batch)
                job.clip_grad_norm_(1.0)
                optimizer.step()
            seen.timeline  # a Timeline on rank 0; None on other ranks

        The first rank at each coordinate of the pipeline axis is recorded. It costs a barrier, and two gathers of a few
        bytes for each event. Other steps cost nothing.

        Args:
            optimizer: one, or several, whose steps are recorded.
        """
        optimizers = [] if optimizer is None else optimizer if isinstance(optimizer, Sequence) else [optimizer]
        with observing(self._runner.stages, self.ledger, optimizers) as observer:
            yield observer

    def program(self, module: str) -> LocalProgram:
        """The recorded program of a module on this rank: ``print(job.program("layers.0").text())``.

        Raises:
            LookupError: it has none; says why.
        """
        program = self._programs.program(module) if self._programs is not None else None
        if program is None:
            why = (
                "nothing is sharded over tp, or the plan is eager"
                if self._programs is None
                else self._programs.refusal(module)
            )
            raise LookupError(f"{module} has no recorded program: {why or 'it has not been called three times'}")
        return program

    def shard_map(self) -> Any:
        """Which rank has which slices, as data (see ``meshwright.shard_map``)."""
        from meshwright.draw.facts import shard_map  # imported when something is drawn

        return shard_map(self.recipe)

    def mismatches(self) -> tuple[Mismatch, ...]:
        """Parameters of which a rank has something else than the recipe says; the same result on all ranks. Collective."""
        return mismatches(self._sharded_model)

    def report(self, title: str = "") -> Any:
        """The report of this job (see ``meshwright.report``); ``mismatches`` are shown as an alarm. Collective."""
        from meshwright.draw.report import report  # imported when something is drawn

        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # of torchrun
        name = title or type(self.module).__name__
        return report(self.recipe, title=name, mismatches=self.mismatches(), per_node=per_node)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer as a full tensor, on rank 0 and CPU; empty on other ranks. Gathered one
        by one."""
        return self._sharded_model.full_state_dict()

    def full_buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each buffer in turn, from the rank whose forward changes it: on rank 0; None on other ranks."""
        return self._sharded_model.full_buffers()

    def full_parameters(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter in turn: the full tensor on rank 0, None on other ranks."""
        return self._sharded_model.full_parameters()

    def full_gradients(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter's gradient in turn: the full tensor on rank 0; None on other ranks, and if there is no gradient."""
        return self._sharded_model.full_gradients()
