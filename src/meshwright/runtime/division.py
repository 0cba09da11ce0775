"""``Division``: divides a batch into this rank's microbatches, and combines their losses into the loss of the batch.

before the first step   a trial of how rows combine into the loss (runtime/row_trials.py)
before each step        this rank's rows in microbatches, and the weight of each
after each step         the loss, summed over all ranks; and a check that the division was valid for this batch. If microbatches
                        took different paths through the model, or a path that was not tried yet, or the batch has another
                        form, a trial of these rows follows.
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
from meshwright.evaluation import StepMode
from meshwright.generators import Generators
from meshwright.runtime.coupling.paths import ForwardId, Paths, first_to_differ
from meshwright.runtime.coupling.trial import COUPLED, MEAN, MOST_ROWS, RATIO, SUM, finite_together_alone, notes
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.pending_numbers import PendingNumbers
from meshwright.runtime.row_trials import RowTrials
from meshwright.runtime.rows.batch import copied, form_of, joined, mapped
from meshwright.runtime.rows.collectives import broadcast_batch, gather_rows
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.loss_weights import SPLIT, MeanFactors
from meshwright.runtime.rows.microbatches import (
    Microbatches,
    NoticeError,
    rows_of,
    split_batch,
    take_rows,
    weigh_microbatches,
)
from meshwright.runtime.runner import Runner
from meshwright.runtime.weights.parameters import local_tensor


class SeenSteps:
    """The kinds of steps so far. A kind is a key: modes of modules, form of the batch, switches, paths through the model."""

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._kinds

    def add(self, kind: Hashable) -> None:
        """Notes a step of this kind."""
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds.add(kind)

    def needs_trial(self, kind: Hashable) -> bool:
        """Notes a step of this kind. Returns whether its rows should be tried, as the kind is new. Of many kinds (the
        model acts on numbers that differ from step to step) only some are tried."""
        if kind in self._kinds:
            return False
        self.add(kind)
        count = len(self._kinds)
        return count <= _TRIED_KINDS or count & (count - 1) == 0


# The first new kinds are tried; then the 16th, 32nd, …, so that a model whose every step is new runs few trials. They
# cost a few forwards each.
_TRIED_KINDS = 8
_MOST_KINDS = 1 << 12  # in memory: some hundred bytes each
_EVEN = 1e-9  # weights that differ by less are equal: they are quotients of row counts, in double precision


@dataclass
class UncheckedStep:
    """A step whose loss has not been read on the host yet.

    Attributes:
        finite: whether the loss of the batch is finite.
        kind: how rows combine into the loss.
        backward: whether the step computed gradients.
        losses: of this rank's ``microbatches``.
    """

    finite: PendingNumbers
    kind: str
    backward: bool
    losses: list[Tensor]
    microbatches: Microbatches


class Division:
    """Divides batches over data ranks and microbatches.

    Args:
        counter: counts the labels that means are divided by; None: means are over rows.
        random: the generators that a forward may draw from.

    Attributes:
        defers_check: whether the loss of a step is checked in the next step, so that the host does not wait for its device.
    """

    def __init__(self, runner: Runner, counter: LabelCounter | None, random: Generators) -> None:
        self._runner, self._counter = runner, counter
        self._trials, self._random = RowTrials(runner, counter, random), random
        self._recipe, self._device = runner.recipe, runner.groups.device
        self._copies = self._recipe.mesh.size // self._recipe.mesh.data_size
        self._paths = Paths(max(1, len(self._recipe.stages)))
        self._stand_in_row: Any = None
        # Of the running step; of the last one that trained.
        self._mode = self._trained = StepMode(runner.modes.now(), backward=True)
        self._seen = SeenSteps()
        # Of the running step: whether its rows are divided; some rows of the batch; its form; the state before the step.
        self._divided, self._batch = False, None
        self._form: Hashable = None
        self._rows = 0
        self._state_before: ModuleState | None = None
        self._unchecked: UncheckedStep | None = None
        self.defers_check = self._device.type != "cpu"

    @property
    def rows(self) -> str:
        """How rows combine into the loss when the model trains; ``auto`` before the first step."""
        return self._trials.of(self._trained).verdict.kind

    @property
    def _kind(self) -> str:
        """How rows combine into the loss in the running step."""
        return self._trials.of(self._mode).verdict.kind

    def settle(self, rows: str) -> None:
        """Sets how rows combine, as an earlier run of this model has found out. Ignored if this run has found out itself."""
        if self.rows == "auto":
            self._trials.settle(self._trained, rows)

    @property
    def once(self) -> bool:
        """Whether every microbatch of a step leaves the same state on modules (see ``Runner.losses``)."""
        return self._kind != SPLIT

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a person on how rows combine."""
        verdicts = self._trials.verdicts
        is_divided = any(verdict.kind not in (COUPLED, "whole") for verdict in verdicts)
        counts = self._counter.notes if self._counter is not None and is_divided else ()
        return tuple(dict.fromkeys((*counts, *(note for verdict in verdicts for note in notes(verdict)))))

    # --- before a step ----------------------------------------------------------------------------------------------

    def microbatches(self, batch: Any, *, backward: bool, notice: bool = False) -> Microbatches:
        """The microbatches of this rank. Collective.

        Args:
            batch: this rank's rows; not used with ``notice``.
            backward: whether the step computes gradients.
            notice: whether this rank, or another of its copy of the model, has something to report.

        Raises:
            NoticeError: some rank has something to report.
        """
        self._mode = StepMode(self._runner.modes.now(), backward)
        if backward:
            self._trained = self._mode
        microbatches = self._divide(batch, notice)
        count = self._recipe.mesh.data_size * len(microbatches.batches)  # of microbatches, on all data ranks
        divided = count > 1 and microbatches.first_row is None and self._kind != SPLIT
        even = all(abs(weight - 1 / count) < _EVEN for weight in microbatches.weights)
        self._paths.begin(self._mode, microbatches.weights, divided=divided, even=even)
        self._divided, self._form, self._batch, self._state_before = divided, self._form_of(batch), batch, None
        if divided and (self._paths.watching or self._kind_of_step(self._paths.NO_PATHS) not in self._seen):
            self._prepare_trial(batch)
        return microbatches

    def _prepare_trial(self, batch: Any) -> None:
        """Copies what a trial after the step needs: rows of the batch, and the state of modules before the step."""
        self._batch = copied(take_rows(batch, 0, MOST_ROWS))
        if self._trials.of(self._mode).steps is not None:
            self._state_before = ModuleState(self._runner.module, self._runner.written())

    def _form_of(self, batch: Any) -> Hashable:
        """The form of a batch. The magnitude of its number of rows is part of it, if a batch has more than any trial."""
        self._rows = rows_of(batch)
        all_rows = self._rows * self._recipe.mesh.data_size
        return form_of(batch), all_rows.bit_length() if all_rows > self._trials.rows_tried else 0

    def _kind_of_step(self, paths: Hashable) -> Hashable:
        """The kind of the running step, as a key; ``paths``: its paths through the model."""
        return self._mode, self._form, self._runner.switches.told, paths

    def watch_forward(self, model: nn.Module, forward_id: ForwardId) -> AbstractContextManager[None]:
        """A context around the forward of a microbatch, which records its path through the model."""
        return self._paths.watch_forward(model, forward_id)

    def random_numbers(self, microbatches: Microbatches) -> AbstractContextManager[None]:
        """A context around the forwards and backwards of a step: data ranks that all run the same rows draw the same numbers in
        it. Collective over them, if they do."""
        if microbatches.first_row is None:
            return nullcontext()
        return self._random.of_first([hosts for _, hosts in self._trials.data_groups()])

    def _divide(self, batch: Any, notice: bool) -> Microbatches:
        """The microbatches of this rank and their weights; before that a trial of how rows combine, if it is due.
        Collective."""
        data, pieces = self._recipe.mesh.data_size, self._recipe.microbatches
        if notice and data == 1:  # one copy of the model has all ranks, and they know of it
            raise NoticeError
        if data * pieces == 1:
            return Microbatches([batch], [1.0], [None])
        if self._trials.before_step(None if notice else batch, self._mode):
            self._form = self._form_of(batch)
            self._seen.add(self._kind_of_step(self._paths.NO_PATHS))
        if self._kind in (COUPLED, "whole"):
            all_rows, first_row = gather_rows(None if notice else batch, self._trials.data_groups())
            return Microbatches([all_rows], [1.0], [None], first_row, copies=data)
        # Every rank has the same number of microbatches, whatever its rows: FSDP2 has collectives in each forward and backward.
        batches = [] if notice else list(split_batch(batch, pieces))
        way = self._kind if self._kind in (SUM, RATIO, SPLIT) else MEAN
        needs_row = not notice and (not all(map(rows_of, batches)) or self._stand_in_row is None)
        row = self._stand_in(batch) if needs_row else None
        weights, factors = weigh_microbatches(
            batches,
            self._counter,
            self._copies,
            # Ranks of one copy of the model have the same rows: each knows all of them.
            groups=self._runner.groups if data > 1 else None,
            way=way,
            timer=self._runner.waiting,
            stand_in=row,
            notice=notice,
        )
        return Microbatches([p if rows_of(p) else copied(row) for p in batches], weights, factors)

    def _stand_in(self, batch: Any) -> Any:
        """A row for microbatches without rows. Its weight is 0.

        It is a row of this rank: a row of zeros may be fully masked, and give a loss that is not finite. If the batch has no
        rows, it is a row of an earlier batch.
        """
        if rows_of(batch):
            self._stand_in_row = copied(take_rows(batch, 0, 1))
        if self._stand_in_row is not None:
            return self._stand_in_row
        return mapped(lambda t: t.new_zeros((1, *t.shape[1:])) if t.dim() and not len(t) else t.clone(), batch)

    # --- after a step -----------------------------------------------------------------------------------------------

    def loss(self, losses: list[Tensor], microbatches: Microbatches) -> Tensor:
        """The loss of the batch. Collective.

        Args:
            losses: of the microbatches, on the ranks that have them: every tp rank of the last stage.

        Raises:
            RowsError: on every rank: the values of this step have shown that its rows cannot be divided.
            UnfrozenError: on every rank: a parameter is trained that was frozen at planning.
        """
        mesh, paths, is_shared = self._recipe.mesh, self._paths, self._is_shared
        factors = [x for x in microbatches.factors if x is not None]
        unfrozen = self._runner.unfrozen()
        # Numbers of the host are summed between hosts, the loss on the device.
        wide = sum(loss.dtype == torch.float64 for loss in losses)
        numbers = [wide, self._is_new_kind(), len(unfrozen), *(paths.sums() if paths.watching else ())]
        facts = torch.tensor([float(x) for x in numbers], dtype=torch.float64, device="cpu")
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # the loss, ignored labels
        for loss in losses:
            sums[0] += loss.double()
        for count in (count for x in factors for count in x.ignored_labels):
            sums[1] += count
        if is_shared:
            with self._runner.waiting.on():
                self._runner.groups.sum([facts, sums])
            sums[0] /= mesh.axis_size("tp") * microbatches.copies
        wide, new, frozen, *sums_of_paths = facts.tolist()
        if self._divided and not is_shared and self._runner.switches.changed:  # maybe on one rank only
            (new,) = self._runner.groups.on_any([new])
        if frozen:
            raise UnfrozenError(unfrozen)
        _refuse_uncounted(factors, sums[1])
        self.finish_step()
        if self._divided:
            self._unchecked = UncheckedStep(
                PendingNumbers(sums[:1].isfinite()), self._kind, self._mode.backward, losses, microbatches
            )
            if not self.defers_check:
                self.finish_step()
        if paths.watching and paths.differ(sums_of_paths):
            self._try_paths(microbatches)
        elif new:
            self._try_what_is_new()
        return sums[0].to(torch.float64 if wide else torch.float32)

    @property
    def _is_shared(self) -> bool:
        """Whether ranks run different parts of a step."""
        mesh = self._recipe.mesh
        return mesh.data_size * mesh.axis_size("pp") > 1 or bool(self._recipe.branches)

    def finish_step(self) -> None:
        """Checks that the loss of the last step is finite, for which the host waits for its device. Collective, if it is not.

        On a CPU a step ends with this check. On a device it is made in the next step, when the loss has long been
        computed, or when this is called before.

        Raises:
            RowsError: on every rank: the loss is not finite, because rows were divided.
        """
        step, self._unchecked = self._unchecked, None
        if step is not None and not all(step.finite.read()):
            self._refuse_parts_not_finite(step)

    def _refuse_parts_not_finite(self, step: UncheckedStep) -> None:
        """Called if the loss of some microbatch is not finite. Runs this microbatch together with one whose loss is finite. If
        the loss of both is not finite either, then neither is that of the batch on one device. Collective.

        Raises:
            RowsError: on every rank: the loss of both is finite; or the optimizer has stepped since, and no trial is possible.
        """
        groups = self._runner.groups
        if self.defers_check and any(groups.on_any([not self._is_finite()])):
            raise RowsError(
                "the loss of a step was not finite, and the optimizer has stepped: whether the loss is finite on one device, "
                "which runs all rows together, cannot be tried any more; call `job.finish_step()` before `optimizer.step()`"
            )
        everywhere: list[Any] = [None] * dist.get_world_size()
        are_finite = [bool(torch.isfinite(loss)) for loss in step.losses]
        dist.all_gather_object(everywhere, are_finite, group=groups.hosts[""])
        pieces = [(rank, m, finite) for rank, of_rank in enumerate(everywhere) for m, finite in enumerate(of_rank)]
        first_not_finite = next(((rank, m) for rank, m, finite in pieces if not finite), None)
        first_finite = next(((rank, m) for rank, m, finite in pieces if finite), None)
        pair = first_not_finite, first_finite
        batches = step.microbatches.batches
        rows = [broadcast_batch(batches[m], rank, groups) for rank, m in filter(None, pair)]
        both = joined(rows) if len(rows) == 2 else None
        if both is None or not finite_together_alone(
            step.kind, both, rows_of(rows[0]), self._trials.forwards(step.backward)
        ):
            return
        (rank, microbatch), *_ = (piece for piece in pair if piece is not None)
        raise RowsError(
            f"the loss of microbatch {microbatch} of rank {rank} is not finite, and that of its rows and others at once is: "
            "the model may take a mean over no elements (0/0), which no weight can correct"
        )

    def _is_finite(self) -> bool:
        """Whether this rank's shards of all parameters are finite."""
        return all(bool(local_tensor(p).isfinite().all()) for p in self._runner.sharded_model.parameters())

    def _is_new_kind(self) -> bool:
        """Whether rows of this step should be tried: no earlier step took these paths, or had a batch of this form."""
        paths = self._paths.key() if self._paths.watching else self._paths.NO_PATHS
        return self._divided and self._seen.needs_trial(self._kind_of_step(paths))

    def _try_what_is_new(self) -> None:
        """Tries whether the rows of this step, which is of a new kind, combine as those of earlier steps.

        Raises:
            RowsError: on every rank: they do not.
        """
        rows, _ = self._trials.rows_to_try(self._batch)
        with nullcontext() if self._state_before is None else self._state_before.restored():
            combine = rows_of(rows) < 2 or self._trials.combine_as(self._kind, rows, rows_of(rows) // 2, self._mode)
            if combine and self._trials.line_beyond(rows, self._rows) is None:
                return
        raise RowsError(
            "in this step the model does what it has not done before (its batch is of another form, it acts on values, or "
            "something was set on it since the step before), and its rows combine otherwise"
        )

    def _try_paths(self, microbatches: Microbatches) -> None:
        """Called if microbatches of this step took different paths. Runs two of these together, and tries whether their loss
        follows from the two losses.

        Raises:
            RowsError: on every rank: it does not.
        """
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, self._paths.by_forward())
        differing = first_to_differ(everywhere)
        assert differing is not None
        *pair, lines = differing
        rows = [broadcast_batch(microbatches.batches[m], rank, self._runner.groups) for rank, m in pair]
        both = joined(rows)
        if both is None or self._trials.combine_as(self._kind, both, rows_of(rows[0]), self._mode):
            self._paths.settle(lines)
            return
        raise RowsError(
            f"at {', '.join(lines)} the model acts on values of its rows, and data ranks or microbatches went different ways"
        )


def _refuse_uncounted(factors: list[MeanFactors], ignored: Tensor) -> None:
    """Refuses ignored labels in a mean whose divisor is not known: microbatches have no weights then.

    Raises:
        RowsError: there are such labels.
    """
    lines = {line for x in factors for line in x.counts.program.uncounted_lines}
    if lines and ignored:  # waits for the device, as the gradients of this step must not be used
        raise RowsError(
            f"the mean at {', '.join(sorted(lines))} ignores {int(ignored)} labels, and how many it counts does not "
            "follow from the batch alone: data ranks and microbatches cannot be weighed"
        )


__all__ = ["Division"]
