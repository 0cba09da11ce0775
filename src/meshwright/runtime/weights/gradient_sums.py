"""Gradients that the job sums over ranks itself: FSDP2 refuses parameters without dims, and knows no stages or branches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.parameters import local_tensor


class OwnSums:
    """Which parameters have gradients that the job sums itself, and over which groups of ranks.

    Attributes:
        groups: parameter → the groups to sum over, in turn; in the order of the recipe, which is the same on every rank.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups) -> None:
        self._model, self._device = model, groups.device
        self.groups = _groups_to_sum_over(recipe, groups)

    def sum(self) -> None:
        """Sums the gradients that the step has made. Collective."""
        named = dict(self._model.named_parameters(remove_duplicate=False)) if self.groups else {}
        for name, groups in self.groups.items():
            if named[name].requires_grad:
                self._sum(named[name], groups)

    def _sum(self, p: nn.Parameter, groups: list[dist.ProcessGroup]) -> None:
        """Sums a gradient over groups, within each of which some rank may have none."""
        for group in groups:
            used = torch.tensor(p.grad is not None, device=self._device).int()
            dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
            if used:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(local_tensor(p.grad), group=group)


def _groups_to_sum_over(recipe: Recipe, groups: Groups) -> dict[str, list[dist.ProcessGroup]]:
    summed_over: dict[str, list[dist.ProcessGroup]] = {}
    for line in recipe.parameters:
        if not recipe.holds(line, groups.rank) or (recipe.in_parts and not line.requires_grad):
            continue  # (where a forward runs whole, somebody may have it trained later)
        owners, over = recipe.owners(line), list[dist.ProcessGroup]()
        if len(line.places) > 1:
            over.append(groups.together[line.places])
        elif line.data == "loose":
            mesh = groups.meshes[line.place]
            over += [mesh[a].get_group() for a in ("dp_replicate", "dp_shard") if mesh[a].size() > 1]
        if len(owners) > 1:
            over.append(groups.shared[owners])
        if over:
            summed_over[line.name] = over
    return summed_over
