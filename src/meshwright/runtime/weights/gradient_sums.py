"""Gradients that the job sums over ranks itself: FSDP2 refuses parameters without dims, and knows no stages or branches.

    before the step   .grad of earlier steps is put aside      so .grad is what this step adds, on this rank
    after the step    .grad is summed over the groups          and added to what was put aside

So calls of ``Job.step`` add up, as backwards do on one device. Putting aside costs memory between two such calls only, and
only for these parameters; after ``zero_grad()`` there is nothing to put aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

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

    @contextmanager
    def of_this_step(self) -> Iterator[None]:
        """For the time of a step: gradients of earlier steps are out of the way, and what the step adds is summed at its end.

        Collective, unless the step raises; then earlier gradients are put back, with what this rank has added.
        """
        earlier = {name: p.grad for name, p in self._parameters() if p.grad is not None}
        for name, p in self._parameters():
            if name in earlier:
                p.grad = None
        try:
            yield
            for name, p in self._parameters():
                self._sum(p, self.groups[name])
        finally:
            for name, p in self._parameters():
                if name in earlier:
                    _add_to(earlier[name], p)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        # Asked for anew each time: FSDP2 puts other objects in place while a unit is gathered.
        named = dict(self._model.named_parameters(remove_duplicate=False)) if self.groups else {}
        return [(name, named[name]) for name in self.groups]

    def _sum(self, p: nn.Parameter, groups: list[dist.ProcessGroup]) -> None:
        """Sums a gradient over groups, within each of which some rank may have none."""
        for group in groups:
            used = torch.tensor(p.grad is not None, device=self._device).int()
            dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
            if used:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(local_tensor(p.grad), group=group)


@torch.no_grad()
def _add_to(earlier: Tensor, p: nn.Parameter) -> None:
    """Adds a parameter's gradient to an earlier one, which is its gradient from then on: the same tensor as before."""
    if p.grad is not None:
        local_tensor(earlier).add_(local_tensor(p.grad))
    p.grad = earlier


def _groups_to_sum_over(recipe: Recipe, groups: Groups) -> dict[str, list[dist.ProcessGroup]]:
    summed_over: dict[str, list[dist.ProcessGroup]] = {}
    for line in recipe.parameters:
        if not line.requires_grad or not recipe.holds(line, groups.rank):
            continue
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
