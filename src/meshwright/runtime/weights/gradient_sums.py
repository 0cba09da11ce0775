"""``GradientSums``: sums the gradients that FSDP2 does not sum over ranks.

Without FSDP2 these are all gradients. With FSDP2, these are the gradients that it leaves out: it refuses parameters without
dims, and knows no stages or branches.

1  used    one small collective between hosts, over all ranks: does any rank have a gradient of the parameter?
2  sums    gradients of one dtype and the same groups are summed as one tensor: one all-reduce for each group. If each forward
           runs as a whole, bucket by bucket while the backward runs (``buckets``)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.private import copy_all
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.buckets import Buckets, flattened, unflattened
from meshwright.runtime.weights.fsdp import needs_fsdp
from meshwright.runtime.weights.parameters import CurrentParameters, local_tensor, zero_gradient


class GradientSums:
    """Sums gradients of the parameters that FSDP2 does not reduce, or not over all ranks.

    Attributes:
        groups: parameter on this rank → the groups over which its gradient is summed, one after the other. The order of
            parameters is that of the recipe, equal on every rank.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups) -> None:
        self._all = groups
        by_fsdp = needs_fsdp(recipe)
        # The names are equal on every rank.
        self._names = [line.name for line in recipe.parameters if _is_summed(line, recipe, by_fsdp)]
        local_lines = [line for line in recipe.held_by(groups.rank) if _is_summed(line, recipe, by_fsdp)]
        self.groups = {line.name: _groups_of(line, recipe, groups, by_fsdp) for line in local_lines}
        self._current = CurrentParameters(model, self.groups)
        # Buckets need backwards of the whole model, and hold all gradients that are summed.
        self._in_buckets = bool(self.groups) and not recipe.in_parts and not by_fsdp
        self._buckets: Buckets | None = None

    def begin(self, microbatches: int) -> None:
        """Call on all ranks before the forwards of a step.

        Args:
            microbatches: the number of backwards of this rank.
        """
        if not self._in_buckets:
            return
        parameters = dict(zip(self.groups, self._current.each(self.groups), strict=True))
        if self._buckets is None or not self._buckets.holds(parameters):
            if self._buckets is not None:
                self._buckets.close()
            (group,) = {*self.groups.values()}.pop()  # of dp_replicate, the only data axis with several ranks
            self._buckets = Buckets(parameters, group)
        self._buckets.begin(microbatches)

    def leave(self) -> None:
        """Call after a step, also after one that raised: later backwards are not the job's."""
        if self._buckets is not None:
            self._buckets.leave()

    @torch.no_grad()
    def sum(self) -> None:
        """Sums the gradients of the step. Collective over all ranks.

        If some rank has a gradient of a parameter, every rank that holds the parameter gets one; else none has one.
        """
        if not self._names:
            return
        if self._buckets is not None:
            self._buckets.finish(self._all.on_any)
            return
        parameters = {name: self._current[name] for name in self.groups}
        has_gradient = [name in parameters and parameters[name].grad is not None for name in self._names]
        used = self._all.on_any(has_gradient)
        grads_by_sum: dict[tuple[Sequence[dist.ProcessGroup], torch.dtype], list[Tensor]] = {}
        for name, is_used in zip(self._names, used, strict=True):
            if not is_used or name not in parameters or not parameters[name].requires_grad:
                continue
            p = parameters[name]
            if p.grad is None:
                p.grad = zero_gradient(p)
            grads_by_sum.setdefault((self.groups[name], p.grad.dtype), []).append(local_tensor(p.grad))
        # In the order of the first parameter of each sum in the recipe: ranks call a group's collectives in one order.
        for (groups, _), grads in grads_by_sum.items():
            _sum(grads, groups)


def _sum(grads: list[Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
    """Sums gradients over groups, in place: one all-reduce of all of them for each group."""
    is_flat = len(grads) == 1 and grads[0].is_contiguous()
    flat = grads[0] if is_flat else flattened(grads)
    for group in groups:
        dist.all_reduce(flat, group=group)
    if not is_flat:
        copy_all(grads, unflattened(flat, grads))


def _is_summed(line: ParameterRecipe, recipe: Recipe, by_fsdp: bool) -> bool:
    """Whether a parameter's gradient is summed by the job. ``by_fsdp``: whether FSDP2 sums those of its units."""
    if recipe.in_parts and not line.requires_grad:
        return False  # (without stages and branches, a person may set ``requires_grad`` later, so it is summed)
    over_data = (line.data == "loose" or not by_fsdp) and any(
        recipe.places.axis_size(line.place, axis) > 1 for axis in ("dp_replicate", "dp_shard")
    )
    return len(line.places) > 1 or over_data or len(recipe.owners(line)) > 1


def _groups_of(line: ParameterRecipe, recipe: Recipe, groups: Groups, by_fsdp: bool) -> tuple[dist.ProcessGroup, ...]:
    """This rank's groups over which the gradient of a parameter that it holds is summed."""
    owners, groups_of_line = recipe.owners(line), list[dist.ProcessGroup]()
    if len(line.places) > 1:
        groups_of_line.append(groups.together[line.places])
    elif line.data == "loose" or not by_fsdp:
        mesh = groups.meshes[line.place]
        groups_of_line += [mesh[a].get_group() for a in ("dp_replicate", "dp_shard") if mesh[a].size() > 1]
    if len(owners) > 1:
        groups_of_line.append(groups.shared[owners])
    return tuple(groups_of_line)
