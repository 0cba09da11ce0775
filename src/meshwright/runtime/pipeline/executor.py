"""``Executor``: runs forwards and backwards of this rank's stages. A model without a pipeline is one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.runtime.batch_caches import LruCache
from meshwright.runtime.coupling.paths import ForwardContext, no_context
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.pipeline.homes import Homes
from meshwright.runtime.pipeline.program import Call, Program, Programs
from meshwright.runtime.pipeline.stage_buffers import StageBuffers
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.pipeline.step import PipelineStep
from meshwright.runtime.pipeline.transfers import Traffic
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import Microbatches, call_model
from meshwright.schedule import Action, Edges, Schedule, make_schedule, with_transfers

Begin = Callable[[], ModuleState]
"""Takes the state of the modules before a step."""


class Executor:
    """Runs the stages of one rank.

    Args:
        stages: of this rank.
        programs: recorded forwards, divided into stages; None if the model runs as one part.
        loss: of the model's output.
    """

    def __init__(self, stages: Stages, programs: Programs | None, loss: Loss) -> None:
        self._stages, self.programs, self._loss = stages, programs, loss
        self._schedules = LruCache[Schedule]()
        self._sharing = Homes(stages.recipe, stages.groups)
        self._buffers = StageBuffers(stages.model, self._sharing)
        self._trying = self._grad = self._wide = False

    @property
    def stages(self) -> list[int]:
        """The numbers of this rank's stages."""
        return self._stages.numbers

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """(action, begin, end) of the last step, in seconds."""
        return self._stages.spans

    @property
    def action(self) -> Action | None:
        """The action that this rank began last; None between steps."""
        return self._stages.action

    @property
    def traffic(self) -> Traffic:
        """Counts of sends to other stages, and the stages that this rank waits for."""
        return self._stages.traffic

    def run(
        self,
        microbatches: Microbatches,
        begin: Begin | None = None,
        forward_context: ForwardContext = no_context,
        *,
        backward: bool,
    ) -> list[Tensor]:
        """Runs the forward (and backward) of all microbatches. Returns their scaled losses, on the ranks of the last stage.

        Args:
            microbatches: the microbatches of this rank, with their weights.
            begin: takes the state of the modules, with which each microbatch then begins; afterwards they have the state that
                the first one left. None: each microbatch begins with the state that the previous one left.
            forward_context: a context for the forward of each stage and microbatch.
            backward: whether to run the backward, which adds gradients to ``.grad``.

        Raises:
            Exception: in a trial of a model in parts, after all communication: the first error of this rank's parts.
        """
        step = self.step(microbatches, call_model, self._loss, begin, forward_context, backward=backward)
        self._perform(step)
        if step.failures:
            raise step.failures[0]
        return step.losses

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward. Returns the model's output with full tensors, on the ranks of the last stage; None on others."""
        step = self.step(Microbatches([(args, kwargs)], [1.0], [None]), _call, None, backward=False)
        self._perform(step)
        return step.result

    def _perform(self, step: PipelineStep) -> None:
        step.perform()
        # Of a trial, too: its next forward begins with what this one left, or with other values in its place.
        self._buffers.note(step.programs)

    def record(self, batch: Any, *, grad: bool = True) -> None:
        """Records the forward for a batch of these shapes, if the model runs in parts and it is not recorded yet. ``grad``:
        whether gradients are enabled in it."""
        if self.programs is not None:
            self.programs.for_batch(batch, call_model, self._loss, grad=grad)

    @contextmanager
    def trying(self, *, grad: bool, wide: bool) -> Iterator[None]:
        """A context for a trial.

        Args:
            grad: whether gradients are enabled in forwards in parts.
            wide: whether forwards, and the values that are sent between stages, are in float64 (runtime/coupling/float64.py)
                and not in the recorded dtypes.
        """
        self._trying, self._grad, self._wide = True, grad, wide
        try:
            with self._stages.trying(wide=wide):
                yield
        finally:
            self._trying = self._grad = self._wide = False

    def step(
        self,
        microbatches: Microbatches,
        call: Call,
        loss: Loss | None,
        begin: Begin | None = None,
        forward_context: ForwardContext = no_context,
        *,
        backward: bool,
    ) -> PipelineStep:
        """A pass over the schedule, ready to begin.

        Args:
            call: runs the model on a microbatch.
            loss: of the model's output; None: the output itself is the result.
            microbatches, begin, forward_context, backward: as for ``run``.
        """
        grad = backward or self._grad  # a trial runs the forward as a step does
        programs = self._programs(microbatches.batches, call, loss, grad=grad)
        schedule = self._schedule(edges_of(programs, backward=backward), len(microbatches.batches), backward=backward)
        self._buffers.bring(programs, lasting=not self._trying)
        return PipelineStep(
            self._stages,
            self._sharing,
            programs,
            schedule,
            microbatches,
            call,
            loss,
            begin and begin(),
            forward_context,
            backward=backward,
            grad=grad,
            trying=self._trying,
            wide=self._wide,
        )

    def edges(self, batches: Sequence[Any]) -> Edges:
        """The pairs of stages between which values and gradients are sent in a step of these microbatches."""
        return edges_of(self._programs(batches, call_model, self._loss, grad=True), backward=True)

    def _programs(self, batches: Sequence[Any], call: Call, loss: Loss | None, *, grad: bool) -> list[Program]:
        """The program of each microbatch; empty if the model runs as one part."""
        if self.programs is None:
            return []
        return [self.programs.for_batch(batch, call, loss, grad=grad) for batch in batches]

    def _schedule(self, edges: Edges, microbatches: int, *, backward: bool) -> Schedule:
        """The actions of each rank of the pipeline axis, with transfers. Recent schedules are cached."""
        recipe = self._stages.recipe

        def make() -> Schedule:
            ranks, stages = recipe.mesh.axis_size("pp"), len(recipe.stage_rank)
            computations = make_schedule(recipe.schedule, ranks, stages, microbatches, backward=backward)
            return with_transfers(computations, edges.forward, edges.backward)

        return self._schedules.get_or_make((microbatches, edges, backward), make)


def edges_of(programs: Sequence[Program], *, backward: bool) -> Edges:
    """The pairs of stages between which any of these programs sends values; and gradients, if ``backward``."""
    forward_edges = tuple(sorted({edge for program in programs for edge in program.crossing.values}))
    if not backward:
        return Edges(forward_edges, ())
    backward_edges = tuple(
        edge
        for edge in forward_edges
        if any(edge in program.crossing.values and program.differentiable(edge) for program in programs)
    )
    return Edges(forward_edges, backward_edges)


def _call(model: nn.Module, arguments: Any) -> Any:
    args, kwargs = arguments
    return model(*args, **kwargs)
