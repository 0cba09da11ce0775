"""Parameters that get a gradient on some data ranks only, because a value decided which of them were used.

FSDP2 reduces, unit by unit, the gradients that are there. Ranks that disagree on which those are would reduce different
things together, or wait for each other. So each rank fills in zeros for the parameters it did not use, just before its
unit is reduced; and what no rank used is taken back to ``None`` after the step, as it is on one device.

FSDP2 reduces a unit in the backward of its inputs, or after the whole backward if they have no gradient. Where a rank skips
the blocks before a unit, its input is the batch. So that all ranks reduce in the same order, such an input has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.private import pytree, without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.fsdp import before_reduction, parameter_groups, without_gradient


class _Anchor(torch.autograd.Function):
    """A tensor without a gradient as one with a gradient, which goes nowhere. No leaf: the model may write to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        return None, None


class Routed:
    """Makes every rank reduce the same set of gradients. Made once, after ``fully_shard``."""

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups) -> None:
        self._groups = groups
        self._filled: set[int] = set()
        self._used: set[int] = set()  # had a gradient in one reduction: a unit that is called twice is reduced twice
        self._earlier: set[int] = set()  # those that have a gradient of an earlier step
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
                    module.register_forward_pre_hook(self._anchored, prepend=True, with_kwargs=True)

    def _fill(self, fsdp_param: Any) -> None:
        if (p := without_gradient(fsdp_param)) is None:
            self._used.add(id(fsdp_param))
            return
        with without_modes():  # a backward may run under the view, to make activations again
            p.grad = torch.zeros_like(p)
        self._filled.add(id(fsdp_param))

    def _anchored(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit's arguments, at least one of them with a gradient, if any can have one."""
        arguments = [*args, *kwargs.values()]
        tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
        first = next((i for i, t in enumerate(arguments) if type(t) is Tensor and t.is_floating_point()), None)
        if first is None or not torch.is_grad_enabled() or any(t.requires_grad for t in tensors):
            return None
        with without_modes():
            arguments[first] = _Anchor.apply(
                arguments[first], torch.zeros((), device=arguments[first].device, requires_grad=True)
            )
        return tuple(arguments[: len(args)]), dict(zip(kwargs, arguments[len(args) :], strict=True))

    def begin(self) -> None:
        """Before a step: gradients that are there already stay, whatever the step uses."""
        self._earlier = {id(p) for _, p in self._parameters if p.sharded_param.grad is not None}

    def settle(self) -> None:
        """After a step's last backward: gradients that no rank had, in this step or before, go back to ``None``. Collective."""
        used = torch.zeros(self._count, dtype=torch.int32, device=self._groups.device)
        for number, fsdp_param in self._parameters:
            used[number] = id(fsdp_param) in self._used or id(fsdp_param) not in self._filled
        self._filled.clear()
        self._used.clear()
        dist.all_reduce(used, dist.ReduceOp.MAX)
        was_used = used.tolist()
        for number, fsdp_param in self._parameters:
            if not was_used[number] and id(fsdp_param) not in self._earlier:
                fsdp_param.sharded_param.grad = None
