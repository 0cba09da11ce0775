"""``Job``: a model laid out over the mesh, ready to train. What ``parallelize`` returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.generators import Generators
from meshwright.recipe import ParameterRecipe
from meshwright.runtime.branches import streams
from meshwright.runtime.division import Division
from meshwright.runtime.guard import Guard
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.rows.batch import as_given, plain, versions, with_shared
from meshwright.runtime.rows.batches import Batches
from meshwright.runtime.rows.loss_weights import LabelCounter
from meshwright.runtime.rows.microbatches import write_back
from meshwright.runtime.runner import Runner
from meshwright.runtime.weights.clip import clip_grad_norm, grad_norm
from meshwright.runtime.weights.gather import whole_buffers, whole_tensors
from meshwright.spmd.comm import Ledger
from meshwright.spmd.one_process import one_process
from meshwright.watch.timer import CommunicationTimer

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers
    from meshwright.checkpoint.load import Loaded
    from meshwright.checkpoint.pretrained import Pretrained
    from meshwright.checkpoint.save import Saving
    from meshwright.checkpoint.staging import Staging


class Job:
    """A model over a mesh. Made by ``parallelize``; every method is called on every rank, alike.

    Attributes:
        module: the model, its parameters laid out; its names are its own.
        recipe: every decision.
        ledger: collectives of the view, in calls and bytes, and its fallbacks, since the start.
        steps: calls of ``step`` so far, the running one included.
        steps_before: optimizer steps of the checkpoint that was loaded, less the calls of ``step`` until then.
        parts: of checkpoints that this rank has read or written so far, asynchronously too.
        random: the generators of this rank.
        guard: compares what ranks should hold alike, every so many steps.
    """

    def __init__(self, runner: Runner, ledger: Ledger, counter: LabelCounter | None, random: Generators) -> None:
        module, recipe, groups = runner.module, runner.recipe, runner.groups
        self.module, self.recipe, self.groups, self.ledger = module, recipe, groups, ledger
        self._runner = runner
        self._division = Division(self._runner, counter, random)
        self.guard = Guard(module, recipe, groups, ledger, recipe.verify)
        self.random, self._out_of_step = random, 0
        self._saving: Saving | None = None
        self._staging: Staging | None = None  # its memory is used again
        self._nothing = nn.Parameter(torch.empty(0, device=groups.device))
        self.steps = self.parts = self.steps_before = 0

    # --- training ---------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """Forward and backward over all microbatches of this rank's rows; gradients are added to ``.grad``.

        Returns:
            The mean loss over the global batch, a tensor without dims, the same on every rank.

        Raises:
            ReplicaError: on every rank, in the steps that compare ranks (``verify`` in the plan): ranks that should hold
                the same bits do not.
            RowsError: on every rank: this step's values have shown that its rows cannot be divided.
        """
        self.steps += 1
        return self._run(batch, backward=True)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """The mean loss over the global batch, without gradients. ``batch``: this rank's rows."""
        return self._run(batch, backward=False)

    @one_process()
    def _run(self, batch: Any, *, backward: bool) -> Tensor:
        self._agree_on_random()
        batch = with_shared(plain(batch), self.recipe.shared_inputs)
        runner, division = self._runner, self._division
        pieces = division.pieces(batch)
        given, before = as_given(pieces.batches[0]), versions(pieces.batches)
        step = self.steps + self.steps_before
        guarded = backward and self.guard.due(self.steps)
        runner.reshard()  # FSDP2's parameters are where gradients are, unless a forward without backward came before
        with self.guard.watching(step) if guarded else nullcontext():
            losses = runner.losses(pieces, division.watched, once=division.once, backward=backward)
        if pieces.gathered is not None:
            write_back(given, before, batch, pieces.gathered)
        runner.settle_modules()
        found = division.loss(losses, pieces)
        if guarded:
            runner.reshard()
            self.guard.compare(step, losses)
        return found

    @one_process()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's rows, its tensors whole; with a pipeline, on the ranks of its last stage, and
        without gradients (None on other ranks)."""
        self._agree_on_random()
        return self._runner.output(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients to a global 2-norm of at most ``max_norm``; returns the norm before."""
        return clip_grad_norm(self.module, self.recipe, self.groups.device, max_norm, self.waiting)

    def grad_norm(self) -> Tensor:
        """The global 2-norm of all gradients."""
        return grad_norm(self.module, self.recipe, self.groups.device, self.waiting)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank holds, for an optimizer; where it holds nothing, one parameter of no elements, as optimizers refuse
        an empty list."""
        held = [p for _, p in self.named_parameters()]
        return iter(held or [self._nothing])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As on one device, by the model's own names."""
        held = {line.name for line in self.recipe.parameters if self.recipe.holds(line, self.groups.rank)}
        return ((name, p) for name, p in self.module.named_parameters() if self.recipe.by_name[name].name in held)

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
            uneven=uneven, num_workers=num_workers,
        )  # fmt: skip

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(
        self, folder: str | os.PathLike[str], optimizer: Optimizers = None, *, step: int, scheduler: Any = None,
        data: Any = None, extra: Any = None, keep: int | None = None, wait: bool = True,
    ) -> Saving:  # fmt: skip
        """Saves what it takes to go on, in any layout: ``folder/step-00000100``, which is there only once it is complete.

        Every rank writes its own pieces (``torch.distributed.checkpoint``) under the names of one device; none holds
        more than its share and one tensor. Random numbers, the plan and the recipe are saved with it.

        Args:
            folder: of checkpoints; one that all ranks see.
            optimizer: one, or several of different parameters.
            step: optimizer steps that were done.
            scheduler: of learning rates: anything with ``state_dict()``.
            data: what ``batches`` returned: where to go on. Anything with ``state_dict()``.
            extra: what else to give back at load: tensors, numbers, text, and lists, tuples and dicts of them; rank 0's.
            keep: how many checkpoints to keep in the folder, the newest; None keeps all.
            wait: False copies what there is to save, and writes while training goes on. One at a time: the next
                save or load waits for it.

        Raises:
            CheckpointError: on every rank: some rank could not save or write, whatever the reason, and nothing of it is
                left; or it would not load.
        """
        from meshwright.checkpoint import jobs, staging, talk  # with DCP, which takes a while to import

        self.saved()
        self._runner.reshard()
        if not wait and self._staging is None:
            self._staging = staging.Staging()
        self._saving = jobs.save(
            lambda: jobs.Owner.of_job(self), talk.RankAgreement(self.groups.files, moved=self.count_file), folder, optimizer,
            step=step, scheduler=scheduler, data=data, extra=extra, keep=keep, staging=None if wait else self._staging,
        )  # fmt: skip
        return self._saving

    def saved(self) -> None:
        """Waits for a checkpoint that is still being written. Raises CheckpointError where that failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(
        self, path: str | os.PathLike[str], optimizer: Optimizers = None, *, scheduler: Any = None, data: Any = None,
        verify: bool = True, or_before: bool = False,
    ) -> Loaded:  # fmt: skip
        """Goes on from a checkpoint, whatever layout it was saved under: each rank reads its own slices.

        Args:
            path: a checkpoint, or a folder of them: the newest.
            optimizer, scheduler, data: as given to ``save``; made as they were then.
            verify: read all of it first, the ranks together, and compare it with its checksums.
            or_before: of a folder, if its newest checkpoint is damaged, take the one before; the notes of what is
                returned say so. Else that is an error. For runs that are started again without a person.

        Raises:
            CheckpointError: on every rank: it is damaged, naming file and tensor, or is not this model's. Nothing has
                been changed then. Or some rank could not read what it had found whole before, or an object did not take
                its state back: then values are in part those of the checkpoint.
        """
        from meshwright.checkpoint import jobs, talk

        self.saved()
        self._runner.reshard()
        loaded = jobs.load(
            lambda: jobs.Owner.of_job(self), talk.RankAgreement(self.groups.files, moved=self.count_file), path, optimizer,
            scheduler=scheduler, data=data, verify=verify, or_before=or_before,
        )  # fmt: skip
        self._division.settle(loaded.rows)
        self.steps_before = loaded.step - self.steps
        self.guard.begin()
        return loaded

    def load_pretrained(self, folder: str | os.PathLike[str], *, strict: bool = True) -> Pretrained:
        """Fills parameters and persistent buffers from safetensors: this rank's slices are read, and nothing else.

        Args:
            folder: ``model.safetensors``, or ``model.safetensors.index.json`` and its files; or a single file. Names are
                those of the model on one device; a base model's prefix may be missing or too much; what transformers
                renames and converts on loading, it does here too. Values take the parameters' types.
            strict: False leaves parameters that the folder lacks (a new head) as they are, and what the model lacks
                unread.

        Returns:
            What was missing and what was not expected.

        Raises:
            PlanError: every problem, before anything is changed; on every rank alike.
        """
        from meshwright.checkpoint.pretrained import load_pretrained  # files of weights are read when some are loaded

        self.saved()  # its ranks talk over the same group
        self._runner.reshard()
        found = load_pretrained(self, folder, strict=strict)
        self.guard.begin()
        return found

    def count_file(self) -> None:
        """A part of a file was read or written: a watch sees that this rank gets on."""
        self.parts += 1

    @property
    def pipeline(self) -> Executor | None:
        """What runs this rank's stages, with when each action of the last step ran and what was sent; None if each forward
        runs as a whole."""
        return self._runner.pipeline

    @property
    def rows(self) -> str:
        """How rows of a batch combine into its loss: ``auto`` until the first step has found out."""
        return self._division.rows

    @property
    def waiting(self) -> CommunicationTimer:
        """How long this rank waits for others."""
        return self._runner.waiting

    @property
    def rank(self) -> int:
        """This process's rank, as the plan's mesh counts them."""
        return self.groups.rank

    @property
    def notes(self) -> tuple[str, ...]:
        """The recipe's notes, and what was found out since."""
        found = [*self._division.notes, streams.note(self.recipe, self.groups.device)]
        if self._out_of_step:
            found.append(
                "something draws random numbers on some ranks only (if rank == 0: torch.rand(1), say), seen before step "
                f"{self._out_of_step}: ranks that run the same forward then took the random state of the first of them"
            )
        return (*self.recipe.notes, *filter(None, found))

    # --- looking ----------------------------------------------------------------------------------------------------

    def shard_map(self) -> Any:
        """Which rank holds what, as data (see ``meshwright.shard_map``)."""
        from meshwright.draw.facts import shard_map  # drawing is loaded when something is drawn

        return shard_map(self.recipe)

    def full_state_dict(self) -> dict[str, Tensor]:
        """On rank 0 every parameter and persistent buffer, whole, on CPU; empty elsewhere. Gathered one at a time."""
        found: dict[str, Tensor] = {}
        for line, value in self.whole_parameters():
            if value is not None:
                for name in (line.name, *line.aliases):
                    found[name] = value
        if self.rank == 0:
            parameters = set(self.recipe.by_name)
            state = {k: v for k, v in self.module.state_dict().items() if k not in parameters}
            found |= {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        persistent = set(found)
        for name, value in self.whole_buffers():
            if value is not None and name in persistent:
                found[name] = value
        return found

    def whole_buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each buffer in turn, as the rank has it whose forward changes it: on rank 0; None elsewhere."""
        return whole_buffers(self.module, self.recipe, self.groups)

    def whole_parameters(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter in turn: whole on rank 0, None elsewhere."""
        self._runner.reshard()
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p)

    def whole_gradients(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter's gradient in turn: whole on rank 0; None elsewhere, and where there is no gradient."""
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p.grad)

    # --- within -----------------------------------------------------------------------------------------------------

    def _agree_on_random(self) -> None:
        """Ranks that run the same forward draw the same numbers from here on."""
        groups = self.groups
        agreed = self.recipe.mesh.axis_size("tp") == 1 or self.random.agree(groups.tp, torch_too=True)
        if self.recipe.mesh.axis_size("pp") > 1:
            agreed &= self.random.agree(groups.pipeline, torch_too=False)
        if not agreed and not self._out_of_step:
            self._out_of_step = max(1, self.steps)
