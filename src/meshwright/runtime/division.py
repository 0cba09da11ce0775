"""``Division``: which rows of a batch this rank runs, in which pieces, and what their losses are of the batch's loss.

before the first step   a trial: how do rows combine (runtime/row_trials.py)?
before each step        the rows that this rank runs, in microbatches, and what each weighs
after it                one sum over all ranks: the loss; and whether the step's values agree with the division: did pieces
                        take different paths, or all of them one that was not tried, or is the batch of another form?
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import RowsError, UnfrozenError
from meshwright.generators import Generators
from meshwright.runtime.coupling.paths import ForwardId, Paths, first_to_differ
from meshwright.runtime.coupling.trial import COUPLED, MEAN, MOST_ROWS, RATIO, SUM, finite_together_alone, notes
from meshwright.runtime.late import Late
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.row_trials import RowTrials
from meshwright.runtime.rows.batch import copied, form_of, joined, mapped
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.loss_weights import SPLIT, Share
from meshwright.runtime.rows.microbatches import Noticed, Pieces, gather_rows, microbatches, rows_of, take_rows, weights
from meshwright.runtime.runner import Runner
from meshwright.runtime.weights.parameters import local_tensor


class Done:
    """What steps did so far: modes of modules, form of the batch, paths."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def knows(self, what: Hashable) -> bool:
        """Whether a step did so."""
        return what in self._known

    def note(self, what: Hashable) -> None:
        """A step does so."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(what)

    def is_new(self, what: Hashable) -> bool:
        """Whether it is to be tried: it is new. Of many (numbers that differ from step to step) only some are."""
        if what in self._known:
            return False
        self.note(what)
        count = len(self._known)
        return count <= _ALL_OF or count & (count - 1) == 0


_ALL_OF, _MOST_KNOWN = 8, 1 << 12


@dataclass
class Unread:
    """A step of which the loss is not read yet.

    Attributes:
        finite: whether the loss of all ranks is.
        kind: how rows combine; ``losses``, ``pieces``: of this rank.
    """

    finite: Late
    kind: str
    losses: list[Tensor]
    pieces: Pieces


class Division:
    """How the rows of batches are divided over data ranks and microbatches.

    Args:
        counter: what means divide by; None: rows alone.
        random: the generators that a forward may draw from.

    Attributes:
        late: whether the loss of a step is looked at a step later, so that no host waits for its device.
    """

    def __init__(self, runner: Runner, counter: LabelCounter | None, random: Generators) -> None:
        self._runner, self._counter = runner, counter
        self._trials = RowTrials(runner, counter, random)
        self._recipe, self._device = runner.recipe, runner.groups.device
        self._copies = self._recipe.mesh.size // self._recipe.mesh.data_size
        self._paths = Paths(max(1, len(self._recipe.stages)))
        self._row: Any = None
        self._evaluating = self._trained = runner.modes.now()  # in the running step; in the last one that trained
        self._done = Done()
        # Of the running step: whether its rows are run apart, and its batch, with its form.
        self._divided, self._batch = False, None
        self._form: Hashable = None
        self._rows = 0
        self._begin: ModuleState | None = None
        self._unread: Unread | None = None
        self.late = self._device.type != "cpu"

    @property
    def rows(self) -> str:
        """How rows combine into the loss when the model trains: ``auto`` until the first step has found out."""
        return self._trials.of(self._trained).verdict.kind

    @property
    def _kind(self) -> str:
        """How they do in the running step."""
        return self._trials.of(self._evaluating).verdict.kind

    def settle(self, rows: str) -> None:
        """Rows combine as another run found, if this one has not found out."""
        if self.rows == "auto":
            self._trials.settle(self._trained, rows)

    @property
    def once(self) -> bool:
        """Whether microbatches leave the same state, whichever of them are run."""
        return self._kind != SPLIT

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of it."""
        verdicts = self._trials.verdicts
        apart = any(verdict.kind not in (COUPLED, "whole") for verdict in verdicts)
        counts = self._counter.notes if self._counter is not None and apart else ()
        return tuple(dict.fromkeys((*counts, *(note for verdict in verdicts for note in notes(verdict)))))

    # --- before a step ----------------------------------------------------------------------------------------------

    def pieces(self, batch: Any, *, notice: bool = False) -> Pieces:
        """What this rank runs of a batch. Collective.

        Args:
            notice: whether this rank, or another of its copy of the model, has something to tell; then ``batch`` is not used.

        Raises:
            Noticed: some rank has.
        """
        self._evaluating = self._runner.modes.now()
        if self._runner.module.training:
            self._trained = self._evaluating
        pieces = self._pieces(batch, notice)
        apart = self._recipe.mesh.data_size * len(pieces.batches) > 1
        divided = apart and pieces.gathered is None and self._kind != SPLIT
        each = 1 / (self._recipe.mesh.data_size * len(pieces.batches))
        even = all(abs(x - each) < 1e-9 for x in pieces.scale)
        self._paths.begin(self._evaluating, pieces.scale, divided=divided, even=even)
        self._divided, self._form, self._batch, self._begin = divided, self._form_of(batch), batch, None
        if divided and (self._paths.watching or not self._done.knows(self._told(self._paths.NOTHING))):
            self._keep_what_it_begins_with(batch)
        return pieces

    def _keep_what_it_begins_with(self, batch: Any) -> None:
        """The step may have to be tried after it: with the rows and the state that it begins with."""
        self._batch = copied(take_rows(batch, 0, MOST_ROWS))
        if self._trials.of(self._evaluating).steps is not None:
            self._begin = ModuleState(self._runner.module, self._runner.written())

    def _form_of(self, batch: Any) -> Hashable:
        """The form of a batch; how many rows it has is a part of it where they are many more than in any trial."""
        self._rows = rows_of(batch)
        all_rows = self._rows * self._recipe.mesh.data_size
        return form_of(batch), all_rows.bit_length() if all_rows > self._trials.rows_tried else 0

    def _told(self, ways: Hashable) -> Hashable:
        """What is told of the running step."""
        return self._evaluating, self._form, self._runner.switches.told, ways

    def watched(self, model: nn.Module, forward_id: ForwardId) -> AbstractContextManager[None]:
        """On during the forward of a piece."""
        return self._paths.watched(model, forward_id)

    def _pieces(self, batch: Any, notice: bool) -> Pieces:
        data, pieces = self._recipe.mesh.data_size, self._recipe.microbatches
        if notice and data == 1:  # a copy of the model is all ranks
            raise Noticed
        if data * pieces == 1:
            return Pieces([batch], [1.0], [None])
        if self._trials.before_step(None if notice else batch, self._evaluating):
            self._form = self._form_of(batch)
            self._done.note(self._told(self._paths.NOTHING))
        if self._kind in (COUPLED, "whole"):
            everything, first = gather_rows(None if notice else batch, self._trials.data_groups())
            return Pieces([everything], [1.0], [None], first, copies=data)
        # As many pieces on every rank, whatever its rows: each forward and backward has collectives of FSDP's.
        split = [] if notice else list(microbatches(batch, pieces))
        way = self._kind if self._kind in (SUM, RATIO, SPLIT) else MEAN
        lacks = not notice and (not all(map(rows_of, split)) or self._row is None)
        row = self._stand_in(batch) if lacks else None
        scale, shares = weights(
            split,
            self._counter,
            self._copies,
            among=self._runner.groups,
            way=way,
            waiting=self._runner.waiting,
            stand_in=row,
            notice=notice,
        )
        return Pieces([p if rows_of(p) else copied(row) for p in split], scale, shares)

    def _stand_in(self, batch: Any) -> Any:
        """A row for pieces that have none, which weighs nothing: one of this rank's own, as rows of zeros may be masked
        away whole, and give no finite loss; in a last batch without rows, one of the batch before."""
        if rows_of(batch):
            self._row = copied(take_rows(batch, 0, 1))
        if self._row is not None:
            return self._row
        return mapped(lambda t: t.new_zeros((1, *t.shape[1:])) if t.dim() and not len(t) else t.clone(), batch)

    # --- after a step -----------------------------------------------------------------------------------------------

    def loss(self, losses: list[Tensor], pieces: Pieces) -> Tensor:
        """The loss of the batch, of those of this rank's pieces: the sum over data ranks, each of which has it once for each
        of its tp ranks, on the last stage.

        Raises:
            RowsError: on every rank: the step's values have shown that its rows cannot be divided.
            UnfrozenError: on every rank.
        """
        mesh, paths, several = self._recipe.mesh, self._paths, self._is_shared
        shares = [share for share in pieces.shares if share is not None]
        unfrozen = self._runner.unfrozen()
        # What hosts know of the step goes between them; the loss stays on the device.
        wide = sum(loss.dtype == torch.float64 for loss in losses)
        told = [wide, self._does_what_is_new(), len(unfrozen), *(paths.sums() if paths.watching else ())]
        facts = torch.tensor([float(x) for x in told], dtype=torch.float64, device="cpu")
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # the loss, ignored labels
        for loss in losses:
            sums[0] += loss.double()
        for ignored in (n for share in shares for n in share.ignored):
            sums[1] += ignored
        if several:
            with self._runner.waiting.on():
                self._runner.groups.sum([facts, sums])
            sums[0] /= mesh.axis_size("tp") * pieces.copies
        wide, new, frozen, *ways = facts.tolist()
        if self._divided and not several and self._runner.switches.changed:  # on one rank alone, perhaps
            (new,) = self._runner.groups.on_any([new])
        if frozen:
            raise UnfrozenError(unfrozen)
        _refuse_uncounted(shares, sums[1])
        self.finish_step()
        if self._divided:
            self._unread = Unread(Late(sums[:1].isfinite()), self._kind, losses, pieces)
            if not self.late:
                self.finish_step()
        if paths.watching and paths.differ(ways):
            self._try_paths(pieces)
        elif new:
            self._try_what_is_new()
        return sums[0].to(torch.float64 if wide else torch.float32)

    @property
    def _is_shared(self) -> bool:
        """Whether ranks have different parts of a step."""
        mesh = self._recipe.mesh
        return mesh.data_size * mesh.axis_size("pp") > 1 or bool(self._recipe.branches)

    def finish_step(self) -> None:
        """Acts on the loss of the last step, for which a device is waited for. Collective, if that was not finite.

        On a CPU a step ends with it. On a device the next step does, when the loss has long been there; or whoever asks before.

        Raises:
            RowsError: on every rank: the loss is not finite, as rows were run apart.
        """
        unread, self._unread = self._unread, None
        if unread is not None and not all(unread.finite.read()):
            self._refuse_parts_not_finite(unread)

    def _refuse_parts_not_finite(self, step: Unread) -> None:
        """The loss of a step is not finite, as that of a piece is not: is that of its rows and others at once? Else it is not
        on one device, either.

        Raises:
            RowsError: on every rank: it is; or the optimizer has stepped since, and it cannot be known any more.
        """
        groups = self._runner.groups
        if self.late and any(groups.on_any([not self._is_finite()])):
            raise RowsError(
                "the loss of a step was not finite, and the optimizer has stepped: whether it is finite on one device, where "
                "rows are not run apart, cannot be known now; `job.finish_step()` before `optimizer.step()` says it in time"
            )
        everywhere: list[Any] = [None] * dist.get_world_size()
        finite_here = [bool(torch.isfinite(loss)) for loss in step.losses]
        dist.all_gather_object(everywhere, finite_here, group=groups.hosts[""])
        pieces = [(rank, m, finite) for rank, there in enumerate(everywhere) for m, finite in enumerate(there)]
        two = [next(((rank, m) for rank, m, finite in pieces if finite == wanted), None) for wanted in (False, True)]
        rows = [self._rows_of_piece(step.pieces, *piece) for piece in two if piece is not None]
        both = joined(rows) if len(rows) == 2 else None
        if both is None or not finite_together_alone(step.kind, both, rows_of(rows[0]), self._trials.forwards()):
            return
        (rank, microbatch), *_ = (piece for piece in two if piece is not None)
        raise RowsError(
            f"the loss of microbatch {microbatch} of rank {rank} is not finite, and that of its rows and others at once is: "
            "the model takes a mean over nothing (0/0), say, which no weight makes right"
        )

    def _is_finite(self) -> bool:
        """Whether what this rank holds of parameters is finite."""
        return all(bool(local_tensor(p).isfinite().all()) for p in self._runner.held.parameters())

    def _does_what_is_new(self) -> bool:
        """Whether no step has taken this one's paths before, nor had a batch of this form."""
        ways = self._paths.ways() if self._paths.watching else self._paths.NOTHING
        return self._divided and self._done.is_new(self._told(ways))

    def _try_what_is_new(self) -> None:
        """Do rows of this step combine as was found in an earlier one?

        Raises:
            RowsError: on every rank: they do not.
        """
        rows, _ = self._trials.rows_to_try(self._batch)
        with nullcontext() if self._begin is None else self._begin.restored():
            combine = rows_of(rows) < 2 or self._trials.combine_as(self._kind, rows, rows_of(rows) // 2)
            if combine and self._trials.line_beyond(rows, self._rows) is None:
                return
        raise RowsError(
            "in this step the model does what it has not done before (its batch is of another form, it acts on values, or "
            "something was set on it since the step before), and its rows combine otherwise"
        )

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
        if both is None or self._trials.combine_as(self._kind, both, rows_of(rows[0])):
            self._paths.settle(lines)
            return
        raise RowsError(
            f"at {', '.join(lines)} the model acts on values of its rows, and data ranks or microbatches went different ways"
        )

    def _rows_of_piece(self, pieces: Pieces, rank: int, microbatch: int) -> Any:
        """A microbatch of some rank, on every rank."""
        holder = [mapped(lambda t: t.detach().cpu(), pieces.batches[microbatch])] if rank == dist.get_rank() else [None]
        dist.broadcast_object_list(holder, src=rank)
        return mapped(lambda t: t.to(self._device), holder[0])


def _refuse_uncounted(shares: list[Share], ignored: Tensor) -> None:
    """Labels that are ignored, in a mean whose count is not known, cannot be weighed."""
    lines = {line for share in shares for line in share.counted.program.lines}
    if lines and ignored:  # the device is waited for: it is a step that must not be taken
        raise RowsError(
            f"the mean at {', '.join(sorted(lines))} ignores {int(ignored)} labels, and how many it counts does not "
            "follow from the batch alone: data ranks and microbatches cannot be weighed"
        )


__all__ = ["Division"]
