"""``RowTrials``: finds out by trials how rows combine into the loss; before the first step, and again if forwards change
the state of modules.

The result of a trial (runtime/coupling/trial.py) is a ``Verdict``. There is one for each mode of a step: a forward may ask
``self.training`` (batch statistics) and ``torch.is_grad_enabled()``. If forwards change the state of modules, the trial is
repeated after 1, 2, 4, 8 … steps: the loss may have got another term.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calls.placeholder import PathError
from meshwright.code_state import CodeState
from meshwright.errors import OF_THE_RUN, StageError, UncutPathError
from meshwright.evaluation import StepMode
from meshwright.generators import Generators
from meshwright.runtime.coupling.attempt import COUPLED, ForwardError, Forwards, Results, Trial
from meshwright.runtime.coupling.paths import ReadLogger
from meshwright.runtime.coupling.row_scaling import line_beyond
from meshwright.runtime.coupling.trial import MOST_ROWS, Verdict, combine_as, error_text, how_rows_combine
from meshwright.runtime.rows.batch import joined
from meshwright.runtime.rows.collectives import broadcast_batch
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.microbatches import NoticeError, rows_of, take_rows, weigh_microbatches
from meshwright.runtime.runner import Runner

_OTHERWISE = (
    "after {} steps they combine otherwise, as the model computes with state that its forwards leave in modules"
)
_BEYOND = "at {} the model computes something else with a few rows than with all of them"
_UNSURE = " (losses and gradients of the last {} steps may have been wrong already)"


@dataclass
class TrialResult:
    """The result of trials with certain modules in evaluation mode.

    Attributes:
        verdict: how rows combine.
        steps: steps since the first trial; None if no trial is repeated, as forwards leave no state that could change the
            result.
    """

    verdict: Verdict
    steps: int | None = None


class RowTrials:
    """Runs trials and stores their results, which are the same on every rank.

    Args:
        counter: counts the labels that means are divided by; None: means are over rows.
        random: the generators that a forward may draw from.

    Attributes:
        rows_tried: the largest number of rows (of all ranks) that a trial has compared with a few rows.
    """

    def __init__(self, runner: Runner, counter: LabelCounter | None, random: Generators) -> None:
        self._runner, self._counter, self._random, self._recipe = runner, counter, random, runner.recipe
        self._copies = self._recipe.mesh.size // self._recipe.mesh.data_size
        self._results: dict[StepMode, TrialResult] = {}
        self.rows_tried = 0

    def of(self, mode: StepMode) -> TrialResult:
        """The result for steps in this mode; before any trial, what the plan says."""
        return self._results.setdefault(mode, TrialResult(Verdict(self._recipe.rows)))

    def settle(self, mode: StepMode, rows: str) -> None:
        """Sets how rows combine, as an earlier run of this model has found out."""
        self._results[mode] = TrialResult(Verdict(rows), None if rows == COUPLED else 0)

    @property
    def verdicts(self) -> list[Verdict]:
        """All results so far."""
        return [result.verdict for result in self._results.values()]

    def before_step(self, batch: Any, mode: StepMode) -> bool:
        """Runs a trial with rows of a batch, if none was run yet, or if one is to be repeated now. Collective.

        Args:
            batch: this rank's rows; None if it has something to report instead.

        Returns:
            Whether there was a trial.

        Raises:
            NoticeError: some rank has something to report.
        """
        result = self.of(mode)
        if result.verdict.kind == "auto":
            result.verdict = self._how_rows_combine(batch, mode)
            result.steps = 0 if result.verdict.changes_state and result.verdict.kind != COUPLED else None
            return result.verdict.kind != "auto"
        if result.steps is None:
            return False
        return self._try_again(batch, mode, result.steps + 1)

    def _try_again(self, batch: Any, mode: StepMode, steps: int) -> bool:
        """Repeats the trial, if it is due after so many ``steps`` since the first one. Returns whether there was a trial."""
        result = self.of(mode)
        result.steps = steps
        if steps & (steps - 1):
            return False
        verdict = self._how_rows_combine(batch, mode)
        if verdict.kind == "auto":
            return False
        if verdict.kind != result.verdict.kind:
            # The steps since the last trial, without the step before which that trial ran.
            unsure = steps - (steps // 2 + 1)
            why = _OTHERWISE.format(steps) + (_UNSURE.format(unsure) if unsure > 0 else "")
            result.verdict, result.steps = Verdict(COUPLED, why), None
        elif not verdict.changes_state:
            result.steps = None
        return True

    def _how_rows_combine(self, batch: Any, mode: StepMode) -> Verdict:
        """Runs a few rows together and in halves. The result is the same on every rank. Collective."""
        rows, fewest = self.rows_to_try(batch)
        single = fewest < 2 * self._recipe.microbatches  # some piece is a single row
        if rows_of(rows) < 2:
            return Verdict("auto")  # all ranks together have a single row: the next step tries again
        dtype = next((p.dtype for p in self._runner.module.parameters() if p.is_floating_point()), torch.float32)
        if self._recipe.precision == "bfloat16":
            dtype = torch.bfloat16
        programs = self._runner.executor.programs
        with programs.forgetting() if programs is not None else nullcontext():
            verdict = how_rows_combine(rows, self.forwards(mode.backward), dtype, single=single)
        if verdict.kind != COUPLED and (line := self.line_beyond(rows, rows_of(batch))) is not None:
            verdict = Verdict(COUPLED, line and _BEYOND.format(line))
        return _merged(verdict)

    def line_beyond(self, rows: Any, rank_rows: int) -> str | None:
        """The line of the model that computes something else with all rows of a step than with the few of a trial. Collective.

        Args:
            rows: some rows of the step.
            rank_rows: how many rows this rank has.

        Returns:
            The line; empty if only other ranks met it; None if no rank did.
        """
        _, most = self._agreed(rank_rows)
        few, all_rows = min(rows_of(rows), MOST_ROWS), most * self._recipe.mesh.data_size
        self.rows_tried = max(self.rows_tried, all_rows)
        if self._counter is None or all_rows <= few:
            return None
        piece = max(few, -(-most // self._recipe.microbatches))
        line = line_beyond(rows, (few, piece, all_rows), self._counter.run_on_meta)
        return line if self._agreed(bool(line))[1] else None

    def rows_to_try(self, batch: Any) -> tuple[Any, int]:
        """Rows for a trial, the same on every rank: so an error of the model is an error of all data ranks, and none waits for
        another's collectives. Collective.

        Returns:
            (rows of the first data ranks; the number of rows of the rank that has the fewest).

        Raises:
            NoticeError: some rank has something to report.
        """
        fewest, _ = self._agreed(-1 if batch is None else rows_of(batch))
        if fewest < 0:
            raise NoticeError
        if self._recipe.mesh.data_size == 1:
            return take_rows(batch, 0, MOST_ROWS), fewest
        sources = self._first_data_ranks()
        rows_of_each = -(-MOST_ROWS // len(sources))
        if fewest < rows_of_each:
            rows_of_each = MOST_ROWS
        groups = self._runner.groups
        rows = joined([broadcast_batch(take_rows(batch, 0, rows_of_each), source, groups) for source in sources])
        if rows is None:  # the ranks padded their rows to different lengths
            rows = broadcast_batch(take_rows(batch, 0, MOST_ROWS), sources[0], groups)
        return take_rows(rows, 0, MOST_ROWS), fewest

    def _first_data_ranks(self) -> list[int]:
        """One rank for each of the first data ranks, as many as a trial has rows."""
        mesh = self._recipe.mesh
        ranks = {mesh.data_index(rank): rank for rank in reversed(range(mesh.size))}
        return [ranks[i] for i in range(min(mesh.data_size, MOST_ROWS))]

    def forwards(self, backward: bool) -> Forwards:
        """The forwards for a trial of steps with, or without, a backward."""
        runner = self._runner
        return Forwards(
            runner.module,
            self._random,
            CodeState(runner.module),
            runner.changed(),
            partial(self._losses, backward),
            self._agreed,
            backward=backward,
            in_parts=runner.pipeline is not None,
        )

    def _losses(self, backward: bool, pieces: list[Any], way: str, trial: Trial, wide: bool) -> Results:
        """Runs some pieces of a batch for a trial.

        Raises:
            Exception: on every rank: an error of the model.
        """
        weights, factors = weigh_microbatches(pieces, self._counter, self._copies, groups=None, way=way)
        try:
            for piece in pieces:  # recorded before the trial, so that recording draws no random numbers in it
                self._runner.executor.record(piece, grad=backward)
        except UncutPathError as error:  # on every rank
            raise ForwardError(str(error)) from error
        results, reads = Results(weights=weights), [ReadLogger(numbers=True) for _ in pieces]
        failures: list[Exception] = []
        for piece, mean_factors, read in zip(pieces, factors, reads, strict=True):
            try:
                with trial():
                    loss, left = self._runner.loss_alone(piece, mean_factors, read.on, grad=backward, wide=wide)
                results.losses.append(loss)
                results.left.append(left)
            except OF_THE_RUN:
                raise
            except Exception as error:
                if self._runner.pipeline is None:
                    raise  # on every rank, as all run the same rows
                if isinstance(error, PathError) and self._runner.recipe.branches:
                    raise StageError(str(error)) from error  # the others wait for what this rank does not send
                failures.append(error)  # maybe on this rank alone: the others wait for it in the next forward
        if self._runner.pipeline is not None:
            self._raise_on_all(failures)
        results.reads = [read.log for read in reads]
        return results

    def _raise_on_all(self, failures: list[Exception]) -> None:
        """Raises an error on every rank, if some rank has one. Collective."""
        if not self._agreed(bool(failures))[1]:
            return
        texts: list[Any] = [None] * dist.get_world_size()
        text = error_text(failures[0]) if failures else ""
        dist.all_gather_object(texts, text, group=self._runner.groups.hosts[""])
        raise ForwardError(next(filter(None, texts)))

    def _agreed(self, number: int) -> tuple[int, int]:
        """(smallest, largest) of the numbers of all ranks. Collective."""
        extremes = torch.tensor([-number, number], device="cpu")
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._runner.groups.hosts[""])
        smallest, largest = extremes.tolist()
        return -smallest, largest

    def combine_as(self, kind: str, rows: Any, first: int, mode: StepMode) -> bool:
        """Whether the loss of some rows follows from that of the ``first`` of them and that of the others, combined as
        ``kind`` says, in steps in this mode. Collective."""
        return combine_as(kind, rows, first, self.forwards(mode.backward))

    def data_groups(self) -> list[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
        """For each data axis, the innermost first: (the group of its ranks, the group of their hosts)."""
        mesh, groups = self._recipe.mesh, self._runner.groups
        axes = [axis for axis in reversed(mesh.data_axes) if mesh.axis_size(axis) > 1]
        return [(groups.sharded[axis].get_group(), groups.hosts[axis]) for axis in axes]


def _merged(verdict: Verdict) -> Verdict:
    """The verdict with the reasons of all ranks: each stage knows only the state of its own modules. Collective."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (verdict.why, verdict.attributes))
    names = dict.fromkeys(name for _, attributes in everywhere for name in attributes)
    return replace(verdict, why=max((why for why, _ in everywhere), key=len), attributes=tuple(names))
