"""``Steps``: runs the steps of a job. In each step:

end        an error on one rank in any of these ends the job on all        runtime/job_end.py
agreement  ranks synchronize their generators, and report problems         runtime/step_agreement.py
division   the batch is divided into this rank's rows and microbatches     runtime/division.py
runner     forward and backward of these                                   runtime/runner.py
division   the loss of the batch is summed over ranks
guard      in some steps: replicas are compared                            runtime/guard.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import Finding, PlanError, ReplicaError, UncutPathError
from meshwright.names import few
from meshwright.plan.keys import CHECKPOINT, DRAWN, PRETRAINED
from meshwright.private import without_modes
from meshwright.runtime.branches import streams
from meshwright.runtime.checksum import checksum
from meshwright.runtime.division import Division
from meshwright.runtime.guard import Guard
from meshwright.runtime.job_end import JobEnd
from meshwright.runtime.rows.batch import (
    check_device,
    plain,
    rows_in_another_dim,
    spelled_form,
    tensors_in,
    with_shared,
)
from meshwright.runtime.rows.collectives import GatheredInputs
from meshwright.runtime.rows.containers import NOTE as CONTAINER_NOTE
from meshwright.runtime.rows.containers import BatchContainers, has_containers
from meshwright.runtime.rows.input_gradients import InputGradients, with_leaves
from meshwright.runtime.rows.microbatches import Microbatches, NoticeError, rows_of
from meshwright.runtime.runner import Runner
from meshwright.runtime.step_agreement import Notice, StepAgreement
from meshwright.runtime.step_notes import is_plain, listed
from meshwright.spmd.dispatcher import full_tensor
from meshwright.spmd.one_process import one_process

_NO_GRADIENTS = Finding(
    where="job.step",
    given="a call under torch.no_grad() or torch.inference_mode()",
    required="gradients, which job.step computes",
    fix="loss = job.evaluate(batch)  # the loss alone\nwith torch.inference_mode(False), torch.enable_grad():  # or this\n"
    "    loss = job.step(batch)",
)


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Inside the ``with``, inference mode is off; if it was on, gradients are off.

    What a job keeps from call to call (gathered parameters, local tensors, the results of trials) would be inference tensors,
    which a later step can neither write to nor save for its backward.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _note_rows(error: Exception, batch: Any) -> None:
    """Adds a note to an error of the model, if tensors of the batch may have rows that are not divided."""
    names = rows_in_another_dim(batch, rows_of(batch))
    if names and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            f"{few(names)}: not divided over data ranks and microbatches, as rows are dim 0. If another dim has the rows, pass "
            "the tensor with rows first, and transpose it in the forward"
        )


class Steps:
    """Runs the steps of a job, and forwards outside steps.

    Attributes:
        count: steps with a backward so far, the running one included.
        before: optimizer steps of the loaded checkpoint minus ``count`` at that time.
    """

    def __init__(self, runner: Runner, division: Division, guard: Guard, agreement: StepAgreement, end: JobEnd) -> None:
        self._runner, self._division, self._guard, self._agreement = runner, division, guard, agreement
        self._end = end
        self.count = self.before = 0
        self._container_note = ""
        self._awaits = {CHECKPOINT: "job.load(...)", PRETRAINED: "job.load_pretrained(...)"}.get(
            runner.recipe.weights, ""
        )

    def resume(self, step: int) -> None:
        """Sets how many optimizer steps were done before the next one."""
        self.before = step - self.count

    @property
    def number(self) -> int:
        """The number of the running step, or of the last one, as errors call it."""
        return self.count + self.before

    def run(self, batch: Any, *, backward: bool) -> Tensor:
        """Runs a batch.

        Args:
            batch: this rank's rows.
            backward: whether to compute gradients too.

        Returns:
            The loss of the global batch.
        """
        self._end.check()
        if backward and not torch.is_grad_enabled():
            raise PlanError([_NO_GRADIENTS], "this call")
        self.count += backward
        errors_end_the_job = self._end.within(self.number, PlanError, ReplicaError)
        stages = self._runner.stages
        with stages.phase("step"), errors_end_the_job, one_process(), stages.uncompiled(), _without_inference_mode():
            return self._run(batch, backward=backward)

    def _run(self, batch: Any, *, backward: bool) -> Tensor:
        runner, guard, step = self._runner, self._guard, self.number
        guarded = backward and guard.due(self.count)
        of_all = self._of_a_copy(UncutPathError)
        with self._end.within(step, PlanError):
            try:
                rows, microbatches = self._begin(batch, backward=backward, guarded=guarded)
            except BaseException:
                self.count -= backward
                raise
            with self._end.within(step, *of_all):
                losses, loss = self._losses(batch, rows, microbatches, guarded=guarded, backward=backward)
        if guarded:
            runner.sharded_model.reshard()
            guard.compare(step, losses)
        return loss

    def _losses(
        self, given: Any, batch: Any, microbatches: Microbatches, *, guarded: bool, backward: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Returns (the scaled losses of this rank's microbatches, the loss of the batch). ``given``: the caller's batch."""
        runner, division = self._runner, self._division
        first = microbatches.first_row
        gathered = None if first is None else GatheredInputs(microbatches.batches[0], batch, first)
        gradients, as_given = InputGradients(given, batch, microbatches), microbatches
        containers = BatchContainers(microbatches.batches, microbatches.weights) if has_containers(given) else None
        if containers is not None:
            as_given = microbatches.with_other_containers()
        guard = self._guard.watching(self.number) if guarded else nullcontext()
        with division.random_numbers(microbatches), guard:
            try:
                losses = runner.losses(microbatches, division.watch_forward, once=division.once, backward=backward)
            except Exception as error:
                if runner.recipe.mesh.data_size * runner.recipe.microbatches > 1:
                    _note_rows(error, batch)
                raise
        if gathered is not None:
            gathered.write_back()
        if containers is not None:
            repeated = containers.give_back(given, rows_of(batch), first, full_tensor)
            self._container_note = self._container_note if repeated else CONTAINER_NOTE
        if backward and not runner.recipe.branches:
            gradients.give(runner.groups)
        runner.settle_modules()
        runner.switches.note()
        return losses, division.loss(losses, as_given)

    def _begin(self, batch: Any, *, backward: bool, guarded: bool) -> tuple[Any, Microbatches]:
        """Prepares a step. Collective over all ranks.

        Returns:
            (the batch, the microbatches of this rank).

        Raises:
            PlanError: something is wrong on some rank with the batch, or with the current state of the model. On every rank.
        """
        runner, problem, form = self._runner, None, ""
        method = "job.step" if backward else "job.evaluate"
        try:
            batch = self._prepared(batch)
            form = f"{method}({spelled_form(batch)})"
            if guarded:
                form += f" with values {self._sum_of(batch)}"
        except Exception as error:  # of whatever type: the other ranks must not wait for this one
            problem = error
            self._end.told(error)
        notice = problem is not None or runner.gradients.has_new_hooks()
        notice |= self._agreement.agree(self.count, form=form, notice=notice)
        try:
            with self._guard.ordered(self.number) if guarded else nullcontext():
                return batch, self._division.microbatches(batch, backward=backward, notice=notice)
        except NoticeError:
            runner.gradients.take_hooks(self._agreement.tell(self._notice(problem, form)))
        return batch, self._division.microbatches(batch, backward=backward)

    def _sum_of(self, batch: Any) -> int:
        """A hash of the bits of a batch."""
        with torch.no_grad(), without_modes():
            sums = [checksum(t) for t in tensors_in(batch) if is_plain(t)]
            return hash(tuple(listed(sums, self._runner.groups.device)))

    def _notice(self, problem: Exception | None, form: str) -> Notice:
        """What this rank reports to the others: a problem, its new hooks, and what it runs."""
        try:
            return Notice(problem, self._runner.gradients.hooked(), self._runner.switches.hooked, form)
        except PlanError as error:
            return Notice(problem or error)

    def _prepared(self, batch: Any) -> Any:
        """Checks the model and a batch, and returns the batch as forwards take it. Raises an error if either is wrong."""
        self._check_weights()
        runner = self._runner
        runner.at_rest()
        batch = with_shared(plain(batch), runner.recipe.shared_inputs)
        check_device(batch, runner.groups.device)
        rows_of(batch)
        return with_leaves(batch)

    def _of_a_copy(self, *errors: type[Exception]) -> tuple[type[Exception], ...]:
        """Errors that all ranks of a copy of the model raise together, if there is one copy: then these are all ranks."""
        return errors if self._runner.recipe.mesh.data_size == 1 else ()

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the model for this rank's rows."""
        self._check_weights()
        errors_end_the_job = self._end.within(self.number, *self._of_a_copy(UncutPathError, PlanError))
        with errors_end_the_job, one_process(), _without_inference_mode():
            self._runner.at_rest()
            form = f"job({spelled_form((args, kwargs))})"
            self._agreement.agree(self.count, form=form, notice=False)
            self._agreement.refuse_different(form)
            try:
                return self._runner.output(args, kwargs)
            finally:
                self._runner.switches.note()

    def take_weights(self, missing: Collection[str] = ()) -> None:
        """Notes that weights were loaded.

        Args:
            missing: names that were not among them.

        Raises:
            PlanError: some parameter still has no values.
        """
        recipe, self._awaits = self._runner.recipe, ""
        without_values = [name for name in missing if name in recipe.by_name] if recipe.weights != DRAWN else []
        if without_values:
            raise PlanError.of(
                "this run",
                where="weights",
                given=f"{recipe.weights}, and what was loaded lacks {few(without_values)}",
                required="values for every parameter",
                fix=f"weights: {DRAWN}",
            )

    def _check_weights(self) -> None:
        """Raises PlanError if weights have no values yet."""
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
        """Notes for a person on what the job has found out since planning."""
        runner = self._runner
        of_parts = streams.note(runner.recipe, runner.groups.device), self._agreement.note, self._container_note
        return tuple(filter(None, (*self._division.notes, *of_parts)))
