"""``Executor``: runs forwards and backwards of this rank's stages. A model that is not in parts is a pipeline of one stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.runtime.coupling.paths import Watched, unwatched
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.pipeline.program import Call, Program, Programs
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.pipeline.step import Step
from meshwright.runtime.pipeline.transfers import Traffic
from meshwright.runtime.recent import Recent
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import Pieces, called
from meshwright.schedule import Action, Edges, Schedule, make_schedule, with_transfers


class Executor:
    """Runs the stages of one rank.

    Args:
        stages: of this rank.
        programs: what parts of a forward are; None if the model is not in parts.
        loss: the loss of the model's output.
    """

    def __init__(self, stages: Stages, programs: Programs | None, loss: Loss) -> None:
        self._stages, self.programs, self._loss = stages, programs, loss
        self._schedules = Recent[Schedule]()
        self._trying = False

    @property
    def stages(self) -> list[int]:
        """The numbers of this rank's stages."""
        return self._stages.numbers

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """When each action of the last step ran, in seconds."""
        return self._stages.spans

    @property
    def action(self) -> Action | None:
        """The action that this rank began last; None between steps."""
        return self._stages.action

    @property
    def traffic(self) -> Traffic:
        """What was sent to other stages so far, and what this rank waits for."""
        return self._stages.traffic

    def run(
        self,
        pieces: Pieces,
        begin: ModuleState | None = None,
        watched: Watched = unwatched,
        *,
        backward: bool,
    ) -> list[Tensor]:
        """Forward (and backward) of all microbatches; their losses, scaled, on the ranks of the last stage.

        Args:
            pieces: the microbatches of this rank's rows, with the share of the loss that each has.
            begin: the state that each microbatch begins with; what the first one leaves stays. None: with what the one before
                has left.
            backward: whether gradients are added to ``.grad``.
            watched: what is on during the forward of a stage and microbatch.
        """
        step = self.step(pieces, called, self._loss, begin, watched, backward=backward)
        step.perform()
        return step.losses

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, its tensors whole, on the ranks of the last stage; None on others."""
        step = self.step(Pieces([(args, kwargs)], [1.0], [None]), _call, None, backward=False)
        step.perform()
        return step.result

    def record(self, batch: Any) -> None:
        """The forward for a batch of these shapes is recorded, if parts of it run and it is not yet."""
        if self.programs is not None:
            self.programs.of(batch, called, self._loss)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Forwards may compute in a wider type than was recorded (runtime/coupling/float64.py): what crosses is cast to the
        recorded one."""
        self._trying = True
        try:
            with self._stages.trying():
                yield
        finally:
            self._trying = False

    def step(
        self,
        pieces: Pieces,
        call: Call,
        loss: Loss | None,
        begin: ModuleState | None = None,
        watched: Watched = unwatched,
        *,
        backward: bool,
    ) -> Step:
        """One pass over the schedule, not begun. ``call`` runs the model on a piece; ``loss`` is taken of what it returns, or
        nothing is; the rest is as for ``run``."""
        grad = backward or self._trying
        programs = self._programs(pieces.batches, call, loss, grad=grad)
        schedule = self._schedule(edges_of(programs, backward=backward), len(pieces.batches), backward=backward)
        return Step(
            self._stages, programs, schedule, pieces, call, loss, begin, watched, backward=backward, trying=self._trying
        )

    def edges(self, batches: Sequence[Any]) -> Edges:
        """Where values and their gradients cross from stage to stage in a step of these microbatches."""
        return edges_of(self._programs(batches, called, self._loss, grad=True), backward=True)

    def _programs(self, batches: Sequence[Any], call: Call, loss: Loss | None, *, grad: bool) -> list[Program]:
        known = self.programs
        return [known.of(batch, call, loss, grad=grad) for batch in batches] if known is not None else []

    def _schedule(self, edges: Edges, microbatches: int, *, backward: bool) -> Schedule:
        """The actions of each rank of the pipeline axis, transfers among them."""
        recipe = self._stages.recipe

        def make() -> Schedule:
            ranks, stages = recipe.mesh.axis_size("pp"), len(recipe.stage_rank)
            plain = make_schedule(recipe.schedule, ranks, stages, microbatches, backward=backward)
            return with_transfers(plain, edges.forward, edges.backward)

        return self._schedules.made((microbatches, edges, backward), make)


def edges_of(programs: Sequence[Program], *, backward: bool) -> Edges:
    """Where values cross in any of these programs."""
    values = tuple(sorted({edge for p in programs for edge in p.crossing.values}))
    back = tuple(e for e in values if any(e in p.crossing.values and p.differentiable(e) for p in programs))
    return Edges(values, back if backward else ())


def _call(model: nn.Module, arguments: Any) -> Any:
    args, kwargs = arguments
    return model(*args, **kwargs)
