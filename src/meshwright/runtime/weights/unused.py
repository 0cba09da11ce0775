"""``UnusedParameters``: lets FSDP2 reduce parameters that only some data ranks use in a step, as values decide.

FSDP2 reduces, unit by unit, the gradients that exist. If ranks have gradients of different parameters, they would reduce
different tensors together, or wait for each other. So each rank fills in zeros for parameters that it did not use, just before
their unit is reduced. After the step, gradients that no rank had are set back to ``None``, as on one device.

FSDP2 reduces a unit in the backward of its inputs; or after the whole backward, if the inputs have no gradient or nothing uses
the unit's result. This may differ between ranks: on a rank that skips the blocks before a unit, the unit's input is the batch.
But all ranks must reduce in one order. So FSDP2 does not follow the inputs of units here (``Unit.follows_inputs``).
Instead, the forward of a unit first makes a node from which the backward also begins, and which reduces the unit. Of the
nodes that are ready, autograd runs the newest first: so this node runs after those of the unit's own forward, and before
those of earlier units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.private import without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.fsdp import before_reduction, parameter_groups, without_gradient
from meshwright.runtime.weights.gradient_sync import GradientSync
from meshwright.runtime.weights.parameters import zero_gradient


class _End(torch.autograd.Function):
    """A node made at the begin of a unit's forward, whose backward reduces the unit. Its value is not used."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, unit: FSDPModule) -> Tensor:
        ctx.unit = unit
        return torch.zeros_like(start)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        with without_modes():
            for group in parameter_groups(ctx.unit):
                group.post_backward()
        return None, None


class UnusedParameters:
    """Makes every rank reduce the same gradients in the same order. Created once, after ``fully_shard``."""

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, sync: GradientSync) -> None:
        self._groups, self._sync = groups, sync
        # ids of FSDP2's parameters, of this step:
        self._filled: set[int] = set()  # got zeros in some reduction
        # had a gradient in at least one reduction: a unit that is called twice is reduced twice
        self._used: set[int] = set()
        self._earlier: set[int] = set()  # had a gradient before the step
        self._count = len(recipe.parameters)
        numbers = {line.name: i for i, line in enumerate(recipe.parameters)}
        named = {id(p): numbers[recipe.by_name[n].name] for n, p in model.named_parameters()}
        self._parameters = [
            (named[id(fsdp_param.sharded_param)], fsdp_param)
            for module in model.modules() if isinstance(module, FSDPModule) for group in parameter_groups(module)
            for fsdp_param in group.fsdp_params
        ]  # fmt: skip
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module):
                    before_reduction(group, self._fill)
                if module is not model:
                    module.register_forward_pre_hook(self._begin_unit, prepend=True)

    def _fill(self, fsdp_param: Any) -> None:
        """Called before a parameter is reduced: gives it zeros if it has no gradient."""
        if (p := without_gradient(fsdp_param)) is None:
            self._used.add(id(fsdp_param))
            return
        with without_modes():  # a backward that recomputes activations runs under the SPMD mode
            p.grad = zero_gradient(p)
        self._filled.add(id(fsdp_param))

    def _begin_unit(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Called before a unit's forward: makes the node that ends the unit's backward."""
        if self._sync.ends is None or not torch.is_grad_enabled():
            return
        assert isinstance(module, FSDPModule)
        with without_modes():
            start = torch.zeros((), device=self._groups.device, requires_grad=True)
            self._sync.ends.append(_End.apply(start, module))

    def begin(self) -> None:
        """Called before a step: records which gradients exist already; they stay, whatever the step uses."""
        self._earlier = {id(p) for _, p in self._parameters if p.sharded_param.grad is not None}

    def drop_unused(self) -> None:
        """Called after a step's last backward: sets gradients that no rank had, now or before, back to ``None``. Collective."""
        used = [False] * self._count
        for number, fsdp_param in self._parameters:
            used[number] = id(fsdp_param) in self._used or id(fsdp_param) not in self._filled
        self._filled.clear()
        self._used.clear()
        was_used = self._groups.on_any(used)
        for number, fsdp_param in self._parameters:
            if not was_used[number] and id(fsdp_param) not in self._earlier:
                fsdp_param.sharded_param.grad = None
