"""``Job``: a model laid out over the mesh, ready to train. What ``parallelize`` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import RowsError
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.run import streams
from meshwright.run.batch import as_given, copied, joined, mapped, plain, versions, with_shared
from meshwright.run.batches import Batches
from meshwright.run.clip import clip_grad_norm, grad_norm
from meshwright.run.counts import SPLIT, LabelCounter, Share, Shares
from meshwright.run.coupling import COUPLED, MEAN, RATIO, SUM, Trial, Verdict, how_rows_combine, note
from meshwright.run.data import reduce_gradients
from meshwright.run.groups import Groups
from meshwright.run.guard import Guard
from meshwright.run.modulestate import ModuleState, make_whole
from meshwright.run.paths import Found, Paths, Reads, Watched, first_to_differ
from meshwright.run.pipeline import Pipeline, StageError
from meshwright.run.randomness import Generators
from meshwright.run.routing import Routed
from meshwright.run.state import whole_buffers, whole_tensors
from meshwright.run.step import (
    BACKWARD,
    Pieces,
    called,
    gather_rows,
    microbatches,
    rows_of,
    take_rows,
    weighed,
    weights,
    write_back,
)
from meshwright.run.sums import OwnSums
from meshwright.run.untouched import Slot
from meshwright.run.waiting import Waiting
from meshwright.view.axis import Ledger
from meshwright.view.mode import GlobalView
from meshwright.view.oneprocess import one_process
from meshwright.view.structure import map_tensors
from meshwright.view.work import whole

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers
    from meshwright.checkpoint.load import Loaded
    from meshwright.checkpoint.pretrained import Pretrained
    from meshwright.checkpoint.save import Saving

Loss = Callable[[Any], Tensor]


def output_loss(output: Any) -> Tensor:
    """The default loss: ``output.loss``, or ``output["loss"]``; a tensor without dims is a loss itself."""
    if isinstance(output, Tensor) and not output.dim():
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TypeError(
            f"the model's output ({type(output).__name__}) has no loss; pass loss=, a function of the output "
            "(on the command line: --loss file.py:function)"
        )
    return loss


class Job:
    """A model over a mesh. Made by ``parallelize``; every method is called on every rank, alike.

    Attributes:
        module: the model, its parameters laid out; its names are its own.
        recipe: every decision.
        rows: how rows of a batch combine into its loss: ``auto`` until the first step has found out.
        ledger: collectives of the view, in calls and bytes, and its fallbacks, since the start.
        steps: calls of ``step`` so far, the running one included.
        steps_before: optimizer steps of the checkpoint that was loaded, less the calls of ``step`` until then.
        parts: of checkpoints that this rank has read or written so far, asynchronously too.
        waiting: how long this rank waits for others.
        random: the generators of this rank.
        guard: compares what ranks should hold alike, every so many steps.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        groups: Groups,
        *,
        view: GlobalView | None,
        ledger: Ledger,
        loss: Loss,
        counter: LabelCounter | None,
        random: Generators,
        routed: Routed | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.module, self.recipe, self.groups, self.ledger = module, recipe, groups, ledger
        self._view, self._loss, self._counter, self._routed = view, loss, counter, routed
        if counter is not None:
            counter.model = module
        self._pipeline = pipeline
        self._own_sums = OwnSums(module, recipe, groups)
        self._paths = Paths(max(1, len(recipe.stages)))
        self.guard = Guard(module, recipe, groups, ledger, recipe.verify)
        self.random, self._out_of_step = random, 0
        self.waiting = Waiting(groups.device) if pipeline is None else pipeline.waiting
        self._row: Any = None
        self._saving: Saving | None = None
        self._units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._nothing = nn.Parameter(torch.empty(0, device=groups.device))
        self._copies = recipe.mesh.size // recipe.mesh.data_size
        self.rows = recipe.rows
        self._verdict = Verdict(recipe.rows)
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
        pieces = self._pieces(batch)
        self._paths.begin(self.module, pieces.scale, divided=self._divides_rows(pieces))
        given, before = as_given(pieces.batches[0]), versions(pieces.batches)
        step = self.steps + self.steps_before
        guarded = backward and self.guard.due(self.steps)
        self._reshard()  # FSDP2's parameters are where gradients are, unless a forward without backward came before
        if backward:
            if self._routed is not None:
                self._routed.begin()
            with self._own_sums.of_this_step(), self.guard.watching(step) if guarded else nullcontext():
                losses = self._losses(pieces, backward=True)
                self._finish_gradients()
        else:
            losses = self._losses(pieces, backward=False)
            self._reshard()
        if pieces.gathered is not None:
            write_back(given, before, batch, pieces.gathered)
        self._settle_modules()
        found = self._summed(losses, pieces)
        if guarded:
            self._reshard()
            self.guard.compare(step, losses)
        return found

    def _losses(self, pieces: Pieces, *, backward: bool) -> list[Tensor]:
        """The scaled losses of all microbatches, on the ranks that have them."""
        # Rows that do not couple leave the same state, whichever of them are run: each microbatch begins with the state
        # that the step begins with, and what the first one leaves stays.
        once = len(pieces.batches) > 1 and self.rows != SPLIT
        begin = ModuleState(self.module, self._written()) if once else None
        if self._pipeline is not None:
            self._sync(last=False)
            watched = self._paths.watched
            return self._pipeline.run(pieces.batches, pieces.scale, pieces.shares, begin, watched, backward=backward)
        found = []
        for i, piece in enumerate(pieces.batches):
            self._sync(last=i == len(pieces.batches) - 1)
            with self._on(), begin.restored() if begin is not None and i else nullcontext():
                with Shares(pieces.shares[i]).on(self.module), self._paths.watched(self.module, (0, i)):
                    loss = weighed(whole(self._loss(called(self.module, piece))), pieces.scale[i])
                if backward and loss.requires_grad:
                    BACKWARD(loss)
            found.append(loss.detach())
        return found

    def _summed(self, losses: list[Tensor], pieces: Pieces) -> Tensor:
        """The sum over data ranks, each of which has it once for each of its tp ranks, on the last stage."""
        found, shares = torch.zeros(3, dtype=torch.float64, device=self.groups.device), pieces.shares
        for loss in losses:
            found[0] += loss.double()
            found[1] += loss.dtype == torch.float64
        uncounted = {line for share in shares if share is not None for line in share.counted.program.lines}
        for ignored in (n for share in shares if share is not None for n in share.ignored):
            found[2] += ignored
        if self._paths.watching:
            found = torch.cat([found, found.new_tensor(self._paths.sums())])
        if self.recipe.mesh.data_size * self.recipe.mesh.axis_size("pp") > 1:
            with self.waiting.on():
                dist.all_reduce(found)
            found[0] /= self.recipe.mesh.axis_size("tp")
        if uncounted and found[2]:
            raise RowsError(
                f"the mean at {', '.join(sorted(uncounted))} ignores {int(found[2])} labels, and how many it counts does not "
                "follow from the batch alone: data ranks and microbatches cannot be weighed"
            )
        if self._paths.watching and self._paths.differ(found[3:].tolist()):
            self._try_paths(pieces)
        return found[0].to(torch.float64 if found[1] else torch.float32)

    def _divides_rows(self, pieces: Pieces) -> bool:
        """Whether the rows of a step are run apart."""
        return self.recipe.mesh.data_size * len(pieces.batches) > 1 and pieces.gathered is None and self.rows != SPLIT

    def _try_paths(self, pieces: Pieces) -> None:
        """Pieces of this step took different paths: is the loss of two of them at once what they make apart?

        Raises:
            RowsError: on every rank: it is not.
        """
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, self._paths.taken())
        differing = first_to_differ(everywhere)
        assert differing is not None
        *two, lines = differing
        rows = [self._rows_of_piece(pieces, *piece) for piece in two]
        both = joined(rows)
        if both is None or self._tried(both, single=False, divided=rows_of(rows[0])).kind == self.rows:
            self._paths.settle(lines)
            return
        raise RowsError(
            f"at {', '.join(lines)} the model acts on values of its rows, and data ranks or microbatches went different ways"
        )

    def _rows_of_piece(self, pieces: Pieces, rank: int, microbatch: int) -> Any:
        """A microbatch of some rank, on every rank."""
        given = [mapped(lambda t: t.detach().cpu(), pieces.batches[microbatch])] if rank == dist.get_rank() else [None]
        dist.broadcast_object_list(given, src=rank)
        return mapped(lambda t: t.to(self.groups.device), given[0])

    @one_process()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's rows, its tensors whole; with a pipeline, on the ranks of its last stage, and
        without gradients (None on other ranks)."""
        self._agree_on_random()
        if self._pipeline is not None:
            self._sync(last=False)
            output = self._pipeline.output(args, kwargs)
            self._settle_modules()
            self._reshard()
            return output
        with self._on():
            output = map_tensors(whole, self.module(*args, **kwargs))
        self._settle_modules()
        if not torch.is_grad_enabled():
            self._reshard()
        return output

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
        drop_last: bool = False, start: int = 0, uneven: bool = False,
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

        Raises:
            PlanError: ``global_batch`` does not divide by data ranks × microbatches.
        """
        return Batches(
            dataset, global_batch, mesh=self.recipe.mesh, rank=self.rank, microbatches=self.recipe.microbatches,
            seed=seed, epochs=epochs, shuffle=shuffle, drop_last=drop_last, start=start, device=self.groups.device,
            uneven=uneven,
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
        from meshwright.checkpoint import jobs, talk  # with DCP, which takes a while to import

        self.saved()
        self._reshard()
        self._saving = jobs.save(
            lambda: jobs.Owner.of_job(self), talk.Talk(self.groups.files, moved=self.count_file), folder, optimizer,
            step=step, scheduler=scheduler, data=data, extra=extra, keep=keep, wait=wait,
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
        self._reshard()
        loaded = jobs.load(
            lambda: jobs.Owner.of_job(self), talk.Talk(self.groups.files, moved=self.count_file), path, optimizer,
            scheduler=scheduler, data=data, verify=verify, or_before=or_before,
        )  # fmt: skip
        if self.rows == "auto":
            self.rows = loaded.rows
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
        self._reshard()
        found = load_pretrained(self, folder, strict=strict)
        self.guard.begin()
        return found

    def count_file(self) -> None:
        """A part of a file was read or written: a watch sees that this rank gets on."""
        self.parts += 1

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's stages, with when each action of the last step ran and what was sent; None without a pipeline."""
        return self._pipeline

    @property
    def rank(self) -> int:
        """This process's rank, as the plan's mesh counts them."""
        return self.groups.rank

    @property
    def notes(self) -> tuple[str, ...]:
        """The recipe's notes, and what was found out since."""
        counts = self._counter.notes if self._counter is not None and self.rows not in (COUPLED, "whole") else ()
        found = [*counts, note(replace(self._verdict, kind=self.rows)), streams.note(self.recipe, self.groups.device)]
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
        self._reshard()
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p)

    def whole_gradients(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter's gradient in turn: whole on rank 0; None elsewhere, and where there is no gradient."""
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p.grad)

    # --- within -----------------------------------------------------------------------------------------------------

    def _settle_modules(self) -> None:
        """What forwards left on modules is whole, as on one device."""
        if self._view is not None:
            make_whole(self.module)

    def _agree_on_random(self) -> None:
        """Ranks that run the same forward draw the same numbers from here on."""
        groups = self.groups
        agreed = self.recipe.mesh.axis_size("tp") == 1 or self.random.agree(groups.tp, torch_too=True)
        if self.recipe.mesh.axis_size("pp") > 1:
            agreed &= self.random.agree(groups.pipeline, torch_too=False)
        if not agreed and not self._out_of_step:
            self._out_of_step = max(1, self.steps)

    def _on(self) -> AbstractContextManager[None]:
        """The view, for a forward and backward."""
        return nullcontext() if self._view is None else self._view.on()

    def _stand_in(self, batch: Any) -> Any:
        """A row for pieces that have none, which weighs nothing: one of this rank's own, as rows of zeros may be masked
        away whole, and give no finite loss; in a last batch without rows, one of the batch before."""
        if rows_of(batch):
            self._row = copied(take_rows(batch, 0, 1))
        if self._row is not None:
            return self._row
        return mapped(lambda t: t.new_zeros((1, *t.shape[1:])) if t.dim() and not len(t) else t.clone(), batch)

    def _pieces(self, batch: Any) -> Pieces:
        """What this rank runs of a batch."""
        data, pieces = self.recipe.mesh.data_size, self.recipe.microbatches
        if data * pieces == 1:
            return Pieces([batch], [1.0], [None])
        if self.rows == "auto":
            self._verdict = self._how_rows_combine(batch)
            self.rows = self._verdict.kind
        if self.rows in (COUPLED, "whole"):
            everything, first = gather_rows(batch, self._data_groups())
            return Pieces([everything], [1 / data], [None], first)
        # As many pieces on every rank, whatever its rows: each forward and backward has collectives of FSDP's.
        split = list(microbatches(batch, pieces))
        way = self.rows if self.rows in (SUM, RATIO, SPLIT) else MEAN
        row = self._stand_in(batch) if not all(map(rows_of, split)) or self._row is None else None
        scale, shares = weights(
            split, self._counter, self._copies, self.groups.device, way=way, waiting=self.waiting, stand_in=row
        )
        return Pieces([p if rows_of(p) else copied(row) for p in split], scale, shares)

    def _how_rows_combine(self, batch: Any) -> Verdict:
        """Tries a few rows, whole and in halves; every rank comes to the same answer."""
        fewest, _ = self._agreed(rows_of(batch))
        single = fewest < 2 * self.recipe.microbatches  # some piece is a single row
        rows = batch if fewest >= 4 else gather_rows(batch, self._data_groups())[0]
        if rows_of(rows) < 2:
            return Verdict(MEAN)
        return self._tried(take_rows(rows, 0, max(fewest, 4)), single=single)

    def _tried(self, rows: Any, *, single: bool, divided: int | None = None) -> Verdict:
        """Tries rows whole and in two parts, of which the first has ``divided`` rows, if that is given."""

        def losses(pieces: list[Any], way: str, trial: Trial) -> tuple[list[float], list[float], list[Found]]:
            scale, shares = weights(pieces, self._counter, self._copies, self.groups.device, way=way, alone=True)
            if self._pipeline is not None:
                for piece in pieces:  # what is recorded draws no numbers in the trial
                    self._pipeline.program(piece, called, self._loss)
            found, reads = [], [Reads(numbers=True) for _ in pieces]
            for piece, share, read in zip(pieces, shares, reads, strict=True):
                with trial(), nullcontext() if self._pipeline is None else self._pipeline.trying():
                    try:
                        found.append(self._loss_alone(piece, share, read.on))
                    finally:
                        self._reshard()
            return found, scale, [read.found for read in reads]

        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.float32)
        if self.recipe.precision == "bfloat16":
            dtype = torch.bfloat16
        # An error in one stage leaves the others waiting for what it would send.
        fatal = (StageError,) if self.recipe.mesh.axis_size("pp") > 1 else ()
        return how_rows_combine(
            rows, self.module, self.random, self._changed(), losses, dtype, self._agreed, fatal, single, divided
        )

    def _agreed(self, number: int) -> tuple[int, int]:
        """The smallest and the largest of all ranks' numbers."""
        found = torch.tensor([-number, number], device=self.groups.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        smallest, largest = found.tolist()
        return -smallest, largest

    def _loose(self) -> set[str]:
        """The parameters that a forward may write to; they are not FSDP's."""
        return {p.name for p in self.recipe.parameters if p.data == "loose" and self.recipe.holds(p, self.groups.rank)}

    def _written(self) -> list[nn.Parameter]:
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return [named[name] for name in sorted(self._loose())]

    def _changed(self) -> list[Slot]:
        """What a forward may change: buffers, and the parameters that it writes."""
        held = self._loose()
        slots: list[Slot] = []
        for path, module in self.module.named_modules():
            slots += [(module, name) for name, _ in module.named_buffers(recurse=False)]
            at = f"{path}." if path else ""
            slots += [(module, name) for name, _ in module.named_parameters(recurse=False) if at + name in held]
        return slots

    def _loss_alone(self, batch: Any, share: Share | None, watched: Watched) -> float:
        batch = copied(batch)  # the model may write to it
        if self._pipeline is not None:
            found = self._pipeline.run([batch], [1.0], [share], watched=watched, backward=False)
            value = torch.tensor([float(x) for x in found] or [0.0], dtype=torch.float64, device=self.groups.device)
            dist.all_reduce(value, group=self.groups.pipeline)
            return float(value)
        with self._on(), Shares(share).on(self.module), watched(self.module, (0, 0)):
            loss = whole(self._loss(called(self.module, batch)))
        return float(loss)

    def _data_groups(self) -> list[dist.ProcessGroup]:
        """The groups over the data axes, the innermost first."""
        axes = reversed(self.recipe.mesh.data_axes)
        return [self.groups.sharded[axis].get_group() for axis in axes if self.recipe.mesh.axis_size(axis) > 1]

    def _reshard(self) -> None:
        """Parameters back to rest. FSDP2 leaves the root gathered after a forward, for a backward that may not come."""
        for unit in self._units:
            unit.reshard()

    def _sync(self, *, last: bool) -> None:
        """Gradients are reduced over data ranks once a step, with the last microbatch."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_is_last_backward(last)
            if self._pipeline is not None:
                self.module.set_reshard_after_backward(last)

    def _finish_gradients(self) -> None:
        """What FSDP2 leaves to do after the last backward: reduce a pipeline's, and agree on which parameters were used."""
        if self._pipeline is not None:
            self._sync(last=True)
            reduce_gradients(self.module)
        if self._routed is not None:
            self._routed.settle()
