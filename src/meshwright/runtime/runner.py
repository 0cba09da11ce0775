"""``Runner``: forwards and backwards of this rank's pieces of a batch, with a pipeline or without, under the view."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.calls.structure import map_tensors
from meshwright.recipe import Recipe
from meshwright.runtime.coupling.paths import Watched
from meshwright.runtime.coupling.untouched import Slot
from meshwright.runtime.groups import Groups
from meshwright.runtime.module_state import ModuleState, make_whole
from meshwright.runtime.pipeline.stages import Pipeline
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.loss_weights import Share, Shares
from meshwright.runtime.rows.microbatches import BACKWARD, Pieces, called, weighed
from meshwright.runtime.weights.fsdp import reduce_gradients
from meshwright.runtime.weights.gradient_sums import OwnSums
from meshwright.runtime.weights.unused import Routed
from meshwright.spmd.dispatcher import whole
from meshwright.spmd.mode import SpmdMode
from meshwright.watch.timer import CommunicationTimer


class Runner:
    """Runs the model on this rank.

    Attributes:
        module: the model, its parameters laid out.
        pipeline: this rank's stages, if there are stages.
        waiting: how long this rank waits for others.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        groups: Groups,
        *,
        view: SpmdMode | None,
        loss: Loss,
        routed: Routed | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.module, self.recipe, self.groups, self.pipeline, self.loss = module, recipe, groups, pipeline, loss
        self._view, self._routed, self._own_sums = view, routed, OwnSums(module, recipe, groups)
        self.waiting = CommunicationTimer(groups.device) if pipeline is None else pipeline.waiting
        self._units = [m for m in module.modules() if isinstance(m, FSDPModule)]

    # --- a step -----------------------------------------------------------------------------------------------------

    def losses(self, pieces: Pieces, watched: Watched, *, once: bool, backward: bool) -> list[Tensor]:
        """The scaled losses of all microbatches, on the ranks that have them; with a backward, their gradients.

        Args:
            watched: what is on during the forward of a stage and microbatch.
            once: microbatches leave the same state, whichever of them are run, as their rows do not couple: each begins with
                the state that the step begins with, and what the first one leaves stays.
        """
        begin = ModuleState(self.module, self.written()) if once and len(pieces.batches) > 1 else None
        if not backward:
            found = self._run(pieces, watched, begin, backward=False)
            self.reshard()
            return found
        if self._routed is not None:
            self._routed.begin()
        with self._own_sums.of_this_step():
            found = self._run(pieces, watched, begin, backward=True)
            self._finish_gradients()
        return found

    def _run(self, pieces: Pieces, watched: Watched, begin: ModuleState | None, *, backward: bool) -> list[Tensor]:
        if self.pipeline is not None:
            self._sync(last=False)
            return self.pipeline.run(pieces.batches, pieces.scale, pieces.shares, begin, watched, backward=backward)
        found = []
        for i, piece in enumerate(pieces.batches):
            self._sync(last=i == len(pieces.batches) - 1)
            with self._on(), begin.restored() if begin is not None and i else nullcontext():
                with Shares(pieces.shares[i]).on(self.module), watched(self.module, (0, i)):
                    loss = weighed(whole(self.loss(called(self.module, piece))), pieces.scale[i])
                if backward and loss.requires_grad:
                    BACKWARD(loss)
            found.append(loss.detach())
        return found

    def _sync(self, *, last: bool) -> None:
        """Gradients are reduced over data ranks once a step, with the last microbatch."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_is_last_backward(last)
            if self.pipeline is not None:
                self.module.set_reshard_after_backward(last)

    def _finish_gradients(self) -> None:
        """What FSDP2 leaves to do after the last backward: reduce a pipeline's, and agree on which parameters were used."""
        if self.pipeline is not None:
            self._sync(last=True)
            reduce_gradients(self.module)
        if self._routed is not None:
            self._routed.settle()

    # --- a forward --------------------------------------------------------------------------------------------------

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, its tensors whole; with a pipeline, on the ranks of its last stage, without gradients."""
        if self.pipeline is not None:
            self._sync(last=False)
            output = self.pipeline.output(args, kwargs)
        else:
            with self._on():
                output = map_tensors(whole, self.module(*args, **kwargs))
        self.settle_modules()
        if self.pipeline is not None or not torch.is_grad_enabled():
            self.reshard()
        return output

    def record(self, batch: Any) -> None:
        """With a pipeline, the forward for a batch of these shapes is recorded, if it is not yet."""
        if self.pipeline is not None:
            self.pipeline.program(batch, called, self.loss)

    def loss_alone(self, batch: Any, share: Share | None, watched: Watched) -> float:
        """The loss of a copy of a batch, in one forward, on every rank; in a trial, which may compute in a wider type."""
        batch = copied(batch)  # the model may write to it
        try:
            if self.pipeline is not None:
                with self.pipeline.trying():
                    found = self.pipeline.run([batch], [1.0], [share], watched=watched, backward=False)
                value = torch.tensor([float(x) for x in found] or [0.0], dtype=torch.float64, device=self.groups.device)
                dist.all_reduce(value, group=self.groups.pipeline)
                return float(value)
            with self._on(), Shares(share).on(self.module), watched(self.module, (0, 0)):
                loss = whole(self.loss(called(self.module, batch)))
            return float(loss)
        finally:
            self.reshard()

    def _on(self) -> AbstractContextManager[None]:
        """The view, for a forward and backward."""
        return nullcontext() if self._view is None else self._view.on()

    # --- the model's state ------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Parameters back to rest. FSDP2 leaves the root gathered after a forward, for a backward that may not come."""
        for unit in self._units:
            unit.reshard()

    def settle_modules(self) -> None:
        """What forwards left on modules is whole, as on one device."""
        if self._view is not None:
            make_whole(self.module)

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
        return {p.name for p in self.recipe.parameters if p.data == "loose" and self.recipe.holds(p, self.groups.rank)}


__all__ = ["Runner"]
