"""``Runner``: what a job does with its model on this rank: steps, forwards, and the state that they leave."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.private import without_modes
from meshwright.runtime.coupling.paths import Watched
from meshwright.runtime.coupling.untouched import Slot
from meshwright.runtime.held import ShardedModel
from meshwright.runtime.module_state import Leftovers, ModuleState
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.pipeline.program import Programs
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.loss_weights import Share
from meshwright.runtime.rows.microbatches import Pieces
from meshwright.runtime.weights.parameters import Standing
from meshwright.runtime.weights.placed import Placed
from meshwright.runtime.weights.step_gradients import StepGradients
from meshwright.runtime.weights.unused import Routed
from meshwright.watch.timer import CommunicationTimer


class Runner:
    """Runs the model on this rank.

    Args:
        programs: what parts of a forward are; None if the model is not in parts.
        gradients: what is done with those of a step.
        routed: what makes ranks agree on which parameters were used, if they may differ.
        wholes: whether forwards may leave sharded tensors on modules.

    Attributes:
        module: the model, its parameters laid out; ``modes``: of its modules.
        held: what this rank holds of it.
        executor: runs this rank's stages; ``stages``: these.
    """

    def __init__(
        self,
        stages: Stages,
        programs: Programs | None,
        loss: Loss,
        gradients: StepGradients,
        *,
        routed: Routed | None = None,
        wholes: bool,
    ) -> None:
        self.module, self.recipe, self.groups, self.modes = stages.model, stages.recipe, stages.groups, stages.modes
        self.executor, self.stages = Executor(stages, programs, loss), stages
        self._sync, self._wholes = stages.sync, wholes
        self._routed, self.gradients, self.switches = routed, gradients, stages.switches
        held = self.recipe.held_by(self.groups.rank)
        self._frozen = [line.name for line in held if not line.requires_grad and self.recipe.in_parts]
        self._standing = Standing(self.module, self._frozen)
        self.held = ShardedModel(self.module, self.recipe, self.groups)
        self._placed, self._leftovers = Placed(self.module, self.recipe), Leftovers(self.module)

    @property
    def pipeline(self) -> Executor | None:
        """What runs parts of forwards; None if each forward runs as a whole."""
        return self.executor if self.executor.programs is not None else None

    @property
    def waiting(self) -> CommunicationTimer:
        """How long this rank waits for others."""
        return self.executor.traffic.waiting

    def at_rest(self) -> None:
        """Parameters are where gradients are, and it is seen what was changed on modules.

        Raises PlanError if parameters are not the job's any more.

        FSDP2's are, unless a forward without backward came before.
        """
        self.held.reshard()
        self._placed.check()
        self.switches.look()

    # --- forwards and backwards ---------------------------------------------------------------------------------------

    def losses(self, pieces: Pieces, watched: Watched, *, once: bool, backward: bool) -> list[Tensor]:
        """The scaled losses of all microbatches, on the ranks that have them; with a backward, their gradients.

        Args:
            watched: what is on during the forward of a stage and microbatch.
            once: microbatches leave the same state, whichever of them are run, as their rows do not couple: each begins with
                the state that the step begins with, and what the first one leaves stays.
        """
        begin = ModuleState(self.module, self.written()) if once and len(pieces.batches) > 1 else None
        if not backward:
            losses = self.executor.run(pieces, begin, watched, backward=False)
            self.held.reshard()
            return losses
        if self._routed is not None:
            self._routed.begin()
        with self.gradients.of_this_step(pieces.copies):
            self.stages.settle(self._placed.same, listened=self._placed.have_backward_hooks())
            try:
                losses = self.executor.run(pieces, begin, watched, backward=True)
            finally:
                self.stages.settle(None)
            self._sync.finish()
            if self._routed is not None:
                self._routed.settle()
        return losses

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, its tensors whole; with a pipeline, on the ranks of its last stage, without gradients."""
        output = self.executor.output(args, kwargs)
        self.settle_modules()
        if self.pipeline is not None or not torch.is_grad_enabled():
            self.held.reshard()
        return output

    def loss_alone(self, batch: Any, share: Share | None, watched: Watched) -> float:
        """The loss of a copy of a batch, in one forward, on every rank; in a trial, which may compute in a wider type."""
        # The model may write to it. What was recorded is found by the types of the batch as it is, not by those of the trial.
        with nullcontext() if self.pipeline is None else without_modes():
            pieces = Pieces([copied(batch)], [1.0], [share])
        try:
            with self.executor.trying():
                losses = self.executor.run(pieces, watched=watched, backward=False)
        finally:
            self.held.reshard()
        with without_modes():  # this is no read of the model's
            value = torch.tensor([float(x) for x in losses] or [0.0], dtype=torch.float64, device="cpu")
            if "pp" in self.groups.hosts:
                dist.all_reduce(value, group=self.groups.hosts["pp"])
            return float(value)

    def unfrozen(self) -> list[str]:
        """The parameters of this rank that are trained, and were not when parts of forwards were planned."""
        return [name for name in self._frozen if self._standing[name].requires_grad]

    # --- the model's state ------------------------------------------------------------------------------------------

    def settle_modules(self) -> None:
        """What forwards left on modules is whole, as on one device."""
        if self._wholes:
            self._leftovers.make_whole()

    def written(self) -> list[nn.Parameter]:
        """The parameters that a forward may write to."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return [named[name] for name in sorted(self._loose())]

    def changed(self) -> list[Slot]:
        """What a forward may change: buffers, and the parameters that it writes."""
        held = self._loose()
        slots: list[Slot] = []
        for path, module in self.module.named_modules():
            slots += [(module, name) for name, _ in module.named_buffers(recurse=False)]
            at = f"{path}." if path else ""
            slots += [(module, name) for name, _ in module.named_parameters(recurse=False) if at + name in held]
        return slots

    def _loose(self) -> set[str]:
        """The parameters that a forward may write to; they are not FSDP's."""
        return {line.name for line in self.recipe.held_by(self.groups.rank) if line.data == "loose"}


__all__ = ["Runner"]
