"""``Runner``: runs the model on this rank: forwards and backwards of steps, and the state that they leave on modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import OF_THE_RUN
from meshwright.private import without_modes
from meshwright.runtime.coupling.paths import ForwardContext, ForwardId
from meshwright.runtime.coupling.trial_state import Slot
from meshwright.runtime.module_state import Leftovers, ModuleState
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.pipeline.program import Programs
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.containers import BatchWatch, Left
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.loss_weights import MeanFactors
from meshwright.runtime.rows.microbatches import Microbatches
from meshwright.runtime.sharded_model import ShardedModel
from meshwright.runtime.weights.parameters import CurrentParameters
from meshwright.runtime.weights.placed_model import PlacedModel
from meshwright.runtime.weights.step_gradients import StepGradients
from meshwright.runtime.weights.unused import UnusedParameters
from meshwright.spmd.dispatcher import full_tensor
from meshwright.watch.timer import CommunicationTimer


class Runner:
    """Runs the model on this rank.

    Args:
        programs: recorded forwards, divided into parts; None if each forward runs as a whole.
        gradients: reduces and accumulates the gradients of a step.
        unused: makes ranks agree on which parameters were used, if values decide that; else None.
        leaves_global_tensors: whether forwards may leave global tensors on modules, which are then gathered.

    Attributes:
        module: the model, with sharded parameters; ``modes``: of its modules.
        sharded_model: the shards of this rank.
        executor: runs this rank's ``stages``.
    """

    def __init__(
        self,
        stages: Stages,
        programs: Programs | None,
        loss: Loss,
        gradients: StepGradients,
        *,
        unused: UnusedParameters | None = None,
        leaves_global_tensors: bool,
    ) -> None:
        self.module, self.recipe, self.groups, self.modes = stages.model, stages.recipe, stages.groups, stages.modes
        self.executor, self.stages = Executor(stages, programs, loss), stages
        self._sync, self._leaves_global_tensors = stages.sync, leaves_global_tensors
        self._unused, self.gradients, self.switches = unused, gradients, stages.switches
        lines = self.recipe.held_by(self.groups.rank)
        self._frozen = [line.name for line in lines if not line.requires_grad and self.recipe.in_parts]
        self._current = CurrentParameters(self.module, self._frozen)
        self.sharded_model = ShardedModel(self.module, self.recipe, self.groups)
        self._placed, self._leftovers = PlacedModel(self.module, self.recipe), Leftovers(self.module)

    @property
    def pipeline(self) -> Executor | None:
        """The executor, if it runs parts of forwards; None if each forward runs as a whole."""
        return self.executor if self.executor.programs is not None else None

    @property
    def waiting(self) -> CommunicationTimer:
        """Measures how long this rank waits for others."""
        return self.executor.traffic.waiting

    def at_rest(self) -> None:
        """Reshards parameters that a forward without backward has left gathered, notes what was changed on modules, and divides
        gradients as the parameters are.

        Raises:
            PlanError: modules have other parameters than those of the job.
        """
        self.sharded_model.reshard()
        self._placed.check()
        self._placed.divide_gradients()
        self.switches.look()

    # --- forwards and backwards ---------------------------------------------------------------------------------------

    def losses(
        self, microbatches: Microbatches, forward_context: ForwardContext, *, once: bool, backward: bool
    ) -> list[Tensor]:
        """Runs all microbatches of this rank.

        Args:
            forward_context: a context around the forward of a stage and microbatch.
            once: every microbatch begins with the state of modules from before the step, and the state that the first one
                leaves stays. So a step leaves the same state however many microbatches it has. For models whose rows do
                not interact.
            backward: whether gradients are computed too.

        Returns:
            The scaled loss of each microbatch, on the ranks that have it.
        """
        is_divided = len(microbatches.batches) > 1
        begin = (lambda: ModuleState(self.module, self.written())) if once and is_divided else None
        if not backward:
            losses = self.executor.run(microbatches, begin, forward_context, backward=False)
            self.sharded_model.reshard()
            return losses
        if self._unused is not None:
            self._unused.begin()
        with self.gradients.of_this_step(microbatches.copies, len(microbatches.batches)):
            self.stages.begin_step(self._placed.token, gradients_observed=self._placed.have_backward_hooks())
            try:
                losses = self.executor.run(microbatches, begin, self._hooked(forward_context), backward=True)
            finally:
                self.stages.end_step()
            self._sync.finish()
            if self._unused is not None:
                self._unused.drop_unused()
        return losses

    def _hooked(self, forward_context: ForwardContext) -> ForwardContext:
        """The context of a forward, with the hooks of parameters for gradients that the forward takes."""

        @contextmanager
        def context(model: nn.Module, forward: ForwardId) -> Iterator[None]:
            with forward_context(model, forward), self.gradients.hooks_within():
                yield

        return context

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the model, as full tensors; with a pipeline, on the ranks of the last stage, without gradients."""
        output = self.executor.output(args, kwargs)
        self.settle_modules()
        if self.pipeline is not None or not torch.is_grad_enabled():
            self.sharded_model.reshard()
        return output

    def loss_alone(
        self, batch: Any, factors: MeanFactors | None, forward_context: ForwardContext, *, grad: bool, wide: bool
    ) -> tuple[float, Left]:
        """One forward of a trial with a copy of a batch.

        Args:
            factors: for the means of the batch.
            forward_context: a context around the forward of a stage and microbatch.
            grad: whether a forward in parts runs with gradients enabled; else they are as the caller has them.
            wide: whether the forward computes in float64.

        Returns:
            (the loss, on every rank; what the forward has left in the batch, on ranks of the last stage).

        Raises:
            Exception: an error of the model on this rank. Other ranks may have none.
        """
        # A copy, as the model may write to it. Made outside the trial: recorded programs are looked up by the batch's own
        # types.
        with nullcontext() if self.pipeline is None else without_modes():
            microbatches = Microbatches([copied(batch)], [1.0], [factors])
            watch = BatchWatch(microbatches.batches[0])
        losses, failure = list[Tensor](), None
        try:
            with self.executor.trying(grad=grad, wide=wide):
                losses = self.executor.run(microbatches, forward_context=self._hooked(forward_context), backward=False)
        except OF_THE_RUN:
            raise
        except Exception as error:
            failure = error
        finally:
            self.sharded_model.reshard()
        with without_modes():  # the model does not read this value
            value = torch.tensor([float(x) for x in losses] or [0.0], dtype=torch.float64, device="cpu")
            if "pp" in self.groups.hosts:
                dist.all_reduce(value, group=self.groups.hosts["pp"])
        if failure is not None:
            raise failure
        with without_modes():
            return float(value), watch.left(full_tensor)

    def unfrozen(self) -> list[str]:
        """The parameters of this rank that were frozen when parts of forwards were planned, and are trained now."""
        return [name for name in self._frozen if self._current[name].requires_grad]

    # --- the model's state ------------------------------------------------------------------------------------------

    def settle_modules(self) -> None:
        """Gathers global tensors that forwards left on modules, as they would be on one device. Collective, if there are
        any."""
        if self._leaves_global_tensors:
            self._leftovers.gather_tensors()

    def written(self) -> list[nn.Parameter]:
        """The parameters that a forward may write to."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return [named[name] for name in sorted(self._loose())]

    def changed(self) -> list[Slot]:
        """(module, name) of each tensor that a forward may change: buffers, and the parameters that it may write to."""
        loose = self._loose()
        slots: list[Slot] = []
        for path, module in self.module.named_modules():
            slots += [(module, name) for name, _ in module.named_buffers(recurse=False)]
            prefix = f"{path}." if path else ""
            slots += [(module, name) for name, _ in module.named_parameters(recurse=False) if prefix + name in loose]
        return slots

    def _loose(self) -> set[str]:
        """The names of the parameters that a forward may write to; FSDP2 does not shard them."""
        return {line.name for line in self.recipe.held_by(self.groups.rank) if line.data == "loose"}


__all__ = ["Runner"]
