"""``RowTrials``: how do rows combine? Tried before the first step, and again if a forward changes the state of modules.

What a trial finds (runtime/coupling/trial.py) is a ``Verdict``, one for each set of modules that are in evaluation mode: batch
statistics are not taken there. If a forward changes the state of modules, it is tried again after 1, 2, 4, 8 … steps: a term
of the loss may have begun.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import StageError
from meshwright.evaluation import Evaluating
from meshwright.generators import Generators
from meshwright.runtime.coupling.paths import ReadLog, Reads
from meshwright.runtime.coupling.sizes import line_beyond
from meshwright.runtime.coupling.trial import COUPLED, MOST_ROWS, Forwards, Trial, Verdict, combine_as, how_rows_combine
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.microbatches import Noticed, gather_rows, rows_of, take_rows, weights
from meshwright.runtime.runner import Runner

_OTHERWISE = "after {} steps they combine otherwise, as it computes with what its forwards leave in its modules"
_BEYOND = "what it does at {} depends on how many rows there are: with a few it is not what it is with all of them"
_UNSURE = " (of the losses and gradients of the last {} steps this may have been true already)"


@dataclass
class Tried:
    """What trials came to, for some modules in evaluation mode.

    Attributes:
        steps: since the first trial, if what forwards leave in modules may change what it finds.
    """

    verdict: Verdict
    steps: int | None = None


class RowTrials:
    """What trials found, and what they run. Every rank comes to the same answers.

    Args:
        counter: what means divide by; None: rows alone.
        random: the generators that a forward may draw from.

    Attributes:
        rows_tried: for how many rows, of all ranks, it is known that a forward does what it does with a few.
    """

    def __init__(self, runner: Runner, counter: LabelCounter | None, random: Generators) -> None:
        self._runner, self._counter, self._random, self._recipe = runner, counter, random, runner.recipe
        self._copies = self._recipe.mesh.size // self._recipe.mesh.data_size
        self._tried: dict[Evaluating, Tried] = {}
        self.rows_tried = 0

    def of(self, evaluating: Evaluating) -> Tried:
        """What was found with these modules in evaluation mode; what the plan says, if nothing was tried."""
        return self._tried.setdefault(evaluating, Tried(Verdict(self._recipe.rows)))

    def settle(self, evaluating: Evaluating, rows: str) -> None:
        """Rows combine as another run found."""
        self._tried[evaluating] = Tried(Verdict(rows), None if rows == COUPLED else 0)

    @property
    def verdicts(self) -> list[Verdict]:
        """All that were found."""
        return [tried.verdict for tried in self._tried.values()]

    def before_step(self, batch: Any, evaluating: Evaluating) -> bool:
        """Tries the rows of a batch, if it is not known how rows combine, or if it is time to try again. Collective.

        Args:
            batch: None if this rank has something to tell instead.

        Returns:
            Whether rows of this batch were tried.

        Raises:
            Noticed: some rank has something to tell, and this is the first that the others hear of it.
        """
        tried = self.of(evaluating)
        if tried.verdict.kind == "auto":
            tried.verdict = self._how_rows_combine(batch)
            tried.steps = 0 if tried.verdict.changes_state and tried.verdict.kind != COUPLED else None
            return tried.verdict.kind != "auto"
        if tried.steps is None:
            return False
        return self._try_again(batch, tried, tried.steps + 1)

    def _try_again(self, batch: Any, tried: Tried, steps: int) -> bool:
        """Before a step, so many after the first trial: do rows still combine as it found?"""
        tried.steps = steps
        if steps & (steps - 1):
            return False
        verdict = self._how_rows_combine(batch)
        if verdict.kind == "auto":
            return False
        if verdict.kind != tried.verdict.kind:
            unsure = steps - (steps // 2 + 1)  # the step after each trial is of what it tried
            why = _OTHERWISE.format(steps) + (_UNSURE.format(unsure) if unsure > 0 else "")
            tried.verdict, tried.steps = Verdict(COUPLED, why), None
        elif not verdict.changes_state:
            tried.steps = None
        return True

    def _how_rows_combine(self, batch: Any) -> Verdict:
        """Tries a few rows, whole and in halves; every rank comes to the same answer."""
        rows, fewest = self.rows_to_try(batch)
        single = fewest < 2 * self._recipe.microbatches  # some piece is a single row
        if rows_of(rows) < 2:
            return Verdict("auto")  # a single row, of all ranks: the next step finds out
        dtype = next((p.dtype for p in self._runner.module.parameters() if p.is_floating_point()), torch.float32)
        if self._recipe.precision == "bfloat16":
            dtype = torch.bfloat16
        verdict = how_rows_combine(rows, self.forwards(), dtype, single=single)
        if verdict.kind != COUPLED and (line := self.line_beyond(rows, rows_of(batch))) is not None:
            verdict = Verdict(COUPLED, line and _BEYOND.format(line))
        return _told_alike(verdict)

    def line_beyond(self, rows: Any, here: int) -> str | None:
        """The model's line that does something else with all rows of a step than with the few that a trial runs, and not only
        more of it. Empty if this rank has not met it; None if no rank has. Collective.

        Args:
            rows: some of the step; ``here``: how many this rank has.
        """
        _, most = self._agreed(here)
        few, all_rows = min(rows_of(rows), MOST_ROWS), most * self._recipe.mesh.data_size
        self.rows_tried = max(self.rows_tried, all_rows)
        if self._counter is None or all_rows <= few:
            return None
        piece = max(few, -(-most // self._recipe.microbatches))
        line = line_beyond(rows, (few, piece, all_rows), self._counter.follow)
        return line if self._agreed(bool(line))[1] else None

    def rows_to_try(self, batch: Any) -> tuple[Any, int]:
        """As many rows on every rank; and how many the rank of fewest has. Collective."""
        fewest, _ = self._agreed(-1 if batch is None else rows_of(batch))
        if fewest < 0:
            raise Noticed
        rows = batch if fewest >= 4 else gather_rows(batch, self.data_groups())[0]
        return take_rows(rows, 0, max(fewest, MOST_ROWS)), fewest

    def forwards(self) -> Forwards:
        """What a trial runs. An error in one stage, or branch, leaves the others waiting for what it would send."""
        waiting = self._recipe.mesh.axis_size("pp") > 1 or bool(self._recipe.branches)
        runner, fatal = self._runner, (StageError,) if waiting else ()
        return Forwards(runner.module, self._random, runner.changed(), self._losses, self._agreed, fatal)

    def _losses(self, pieces: list[Any], way: str, trial: Trial) -> tuple[list[float], list[float], list[ReadLog]]:
        """For a trial: the loss of each piece, what it weighs, and what was read of it."""
        scale, shares = weights(pieces, self._counter, self._copies, among=None, way=way)
        for piece in pieces:  # what is recorded draws no numbers in the trial
            self._runner.executor.record(piece)
        losses, reads = [], [Reads(numbers=True) for _ in pieces]
        for piece, share, read in zip(pieces, shares, reads, strict=True):
            with trial():
                losses.append(self._runner.loss_alone(piece, share, read.on))
        return losses, scale, [read.log for read in reads]

    def _agreed(self, number: int) -> tuple[int, int]:
        """The smallest and the largest of all ranks' numbers."""
        extremes = torch.tensor([-number, number], device="cpu")
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._runner.groups.hosts[""])
        smallest, largest = extremes.tolist()
        return -smallest, largest

    def combine_as(self, kind: str, rows: Any, first: int) -> bool:
        """Whether the first of some rows, and the others, combine in this way. Collective."""
        return combine_as(kind, rows, first, self.forwards())

    def data_groups(self) -> list[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
        """The groups over the data axes, the innermost first: of their ranks, and of the hosts of these."""
        mesh, groups = self._recipe.mesh, self._runner.groups
        axes = [axis for axis in reversed(mesh.data_axes) if mesh.axis_size(axis) > 1]
        return [(groups.sharded[axis].get_group(), groups.hosts[axis]) for axis in axes]


def _told_alike(verdict: Verdict) -> Verdict:
    """The verdict, with the reasons of all ranks: a stage sees what its own modules leave. Collective."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (verdict.why, verdict.kept))
    names = dict.fromkeys(name for _, kept in everywhere for name in kept)
    return replace(verdict, why=max((why for why, _ in everywhere), key=len), kept=tuple(names))
