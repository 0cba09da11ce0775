"""``Steps``: the steps of a job, one after another.

end        an error that one rank alone meets in any of this ends the job on all           runtime/job_end.py
agreement  what ranks have in common, and whether one of them has something to tell      runtime/step_agreement.py
division   which rows this rank runs, in which pieces                      runtime/division.py
runner     forward and backward of these pieces                            runtime/runner.py
division   the loss of the batch
guard      in some steps: do ranks hold alike what they should?            runtime/guard.py
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import PlanError, ReplicaError, UncutPathError
from meshwright.names import few
from meshwright.plan.keys import CHECKPOINT, DRAWN, PRETRAINED
from meshwright.private import without_modes
from meshwright.runtime.branches import streams
from meshwright.runtime.checksum import checksum
from meshwright.runtime.division import Division
from meshwright.runtime.guard import Guard
from meshwright.runtime.job_end import JobEnd
from meshwright.runtime.rows.batch import as_given, check_device, plain, spelled_form, tensors_in, versions, with_shared
from meshwright.runtime.rows.microbatches import Noticed, Pieces, rows_of, write_back
from meshwright.runtime.runner import Runner
from meshwright.runtime.step_agreement import Notice, StepAgreement
from meshwright.runtime.step_notes import is_plain, listed
from meshwright.spmd.one_process import one_process


class Steps:
    """Runs a batch, or what the model is called with.

    Attributes:
        count: steps with a backward so far, the running one included.
        before: optimizer steps of the checkpoint that was loaded, less ``count`` then.
    """

    def __init__(self, runner: Runner, division: Division, guard: Guard, agreement: StepAgreement, end: JobEnd) -> None:
        self._runner, self._division, self._guard, self._agreement = runner, division, guard, agreement
        self._end = end
        self.count = self.before = 0
        self._awaits = {CHECKPOINT: "job.load(...)", PRETRAINED: "job.load_pretrained(...)"}.get(
            runner.recipe.weights, ""
        )

    def resume(self, step: int) -> None:
        """So many optimizer steps were done before the next one."""
        self.before = step - self.count

    @property
    def number(self) -> int:
        """Of the running step, or the last one, as errors call it."""
        return self.count + self.before

    def run(self, batch: Any, *, backward: bool) -> Tensor:
        """The loss of a batch; with a backward, its gradients too. ``batch``: this rank's rows."""
        self._end.check()
        self.count += backward
        with self._runner.stages.phase("step"), self._end.within(self.number, PlanError, ReplicaError), one_process():
            return self._run(batch, backward=backward)

    def _run(self, batch: Any, *, backward: bool) -> Tensor:
        runner, guard, step = self._runner, self._guard, self.number
        try:
            batch, pieces = self._begin(batch, "job.step" if backward else "job.evaluate")
        except BaseException:
            self.count -= backward
            raise
        guarded = backward and guard.due(self.count)
        # A path that cannot be cut is told to the ranks of a copy of the model.
        with self._end.within(step, *([UncutPathError] if runner.recipe.mesh.data_size == 1 else [])):
            losses, loss = self._losses(batch, pieces, guarded=guarded, backward=backward)
        if guarded:
            runner.held.reshard()
            guard.compare(step, losses)
        return loss

    def _losses(self, batch: Any, pieces: Pieces, *, guarded: bool, backward: bool) -> tuple[list[Tensor], Tensor]:
        """The scaled losses of this rank's microbatches; the loss of the batch."""
        runner, division = self._runner, self._division
        given, before = as_given(pieces.batches[0]), versions(pieces.batches)
        with self._guard.watching(self.number) if guarded else nullcontext():
            losses = runner.losses(pieces, division.watched, once=division.once, backward=backward)
        if pieces.gathered is not None:
            write_back(given, before, batch, pieces.gathered)
        runner.settle_modules()
        runner.switches.note()
        return losses, division.loss(losses, pieces)

    def _begin(self, batch: Any, method: str) -> tuple[Any, Pieces]:
        """The batch, and what this rank runs of it. Collective over all ranks.

        Raises:
            PlanError: something is wrong with the batch, or with the model as it stands, on some rank. On every rank.
        """
        runner, wrong, form = self._runner, None, ""
        try:
            batch = self._ready(batch)
            form = f"{method}({spelled_form(batch)})"
            if method == "job.step" and self._guard.due(self.count):
                form += f" with values {self._sum_of(batch)}"
        except Exception as error:  # whatever it is, the other ranks are to know
            wrong = error
            self._end.told(error)
        notice = wrong is not None or runner.gradients.has_new_hooks()
        notice |= self._agreement.agree(self.count, form=form, notice=notice)
        try:
            return batch, self._division.pieces(batch, notice=notice)
        except Noticed:
            runner.gradients.take_hooks(self._agreement.tell(self._notice(wrong, form)))
        return batch, self._division.pieces(batch)

    def _sum_of(self, batch: Any) -> int:
        """A number that follows from the bits of a batch."""
        with torch.no_grad(), without_modes():
            sums = [checksum(t) for t in tensors_in(batch) if is_plain(t)]
            return hash(tuple(listed(sums, self._runner.groups.device)))

    def _notice(self, wrong: Exception | None, form: str) -> Notice:
        """What this rank has to tell."""
        try:
            return Notice(wrong, self._runner.gradients.hooked(), self._runner.switches.hooked, form)
        except PlanError as error:
            return Notice(wrong or error)

    def _ready(self, batch: Any) -> Any:
        """A batch as forwards take it, of a model that is as it should be. Raises what is wrong on this rank."""
        self._check_weights()
        runner = self._runner
        runner.at_rest()
        batch = with_shared(plain(batch), runner.recipe.shared_inputs)
        check_device(batch, runner.groups.device)
        rows_of(batch)
        return batch

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for this rank's rows."""
        self._check_weights()
        with self._end.within(self.number), one_process():
            self._runner.at_rest()
            form = f"job({spelled_form((args, kwargs))})"
            self._agreement.agree(self.count, form=form, notice=False)
            self._agreement.refuse_different(form)
            try:
                return self._runner.output(args, kwargs)
            finally:
                self._runner.switches.note()

    def take_weights(self, missing: Collection[str] = ()) -> None:
        """Weights were loaded, but for some names.

        Raises:
            PlanError: some parameter has no values now.
        """
        recipe, self._awaits = self._runner.recipe, ""
        without = [name for name in missing if name in recipe.by_name] if recipe.weights != DRAWN else []
        if without:
            raise PlanError.of(
                "this run",
                where="weights",
                given=f"{recipe.weights}, and what was loaded lacks {few(without)}",
                required="values for every parameter",
                fix=f"weights: {DRAWN}",
            )

    def _check_weights(self) -> None:
        """Raises PlanError while weights have no values."""
        if self._awaits:
            raise PlanError.of(
                "this run",
                where="weights",
                given=f"{self._runner.recipe.weights}, and nothing was loaded: parameters are not numbers yet",
                required=f"{self._awaits} before the first forward",
                fix=f"{self._awaits}, or weights: {DRAWN}",
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found out since the recipe."""
        runner = self._runner
        notes = (*self._division.notes, streams.note(runner.recipe, runner.groups.device), self._agreement.note)
        return tuple(filter(None, notes))
