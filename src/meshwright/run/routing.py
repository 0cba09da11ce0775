"""Parameters that get a gradient on some data ranks only, because a value decided which of them were used.

FSDP2 reduces, unit by unit, the gradients that are there. Ranks that disagree on which those are would reduce different
things together, or wait for each other. So each rank fills in zeros for the parameters it did not use, just before its
unit is reduced; and what no rank used is taken back to ``None`` after the step, as it is on one device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.private import without_modes
from meshwright.run.data import before_reduction, parameter_groups, without_gradient
from meshwright.run.groups import Groups


class Routed:
    """Makes every rank reduce the same set of gradients. Made once, after ``fully_shard``."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        self._groups = groups
        self._filled: set[int] = set()
        self._parameters = [
            fsdp_param for module in model.modules() if isinstance(module, FSDPModule) for group in parameter_groups(module)
            for fsdp_param in group.fsdp_params
        ]  # fmt: skip
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in parameter_groups(module):
                    before_reduction(group, self._fill)

    def _fill(self, fsdp_param: Any) -> None:
        if (p := without_gradient(fsdp_param)) is not None:
            with without_modes():  # a backward may run under the view, to make activations again
                p.grad = torch.zeros_like(p)
            self._filled.add(id(fsdp_param))

    def settle(self) -> None:
        """After a step's last backward: gradients that no rank had go back to ``None``. Collective."""
        used = torch.tensor([id(p) not in self._filled for p in self._parameters], device=self._groups.device).int()
        self._filled.clear()
        for axis in ("dp_replicate", "dp_shard", "tp"):
            if len(used) and self._groups.mesh.axis_size(axis) > 1:
                dist.all_reduce(used, dist.ReduceOp.MAX, group=self._groups.sharded[axis].get_group())
        for fsdp_param, was_used in zip(self._parameters, used.tolist(), strict=True):
            if not was_used:
                fsdp_param.sharded_param.grad = None
