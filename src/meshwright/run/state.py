"""Whole values from what the ranks hold, by the recipe's slices; one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.recipe import ParameterRecipe, Recipe, place_slices
from meshwright.run.groups import Groups
from meshwright.run.parameters import local_tensor


def gather_whole(line: ParameterRecipe, local: Tensor, recipe: Recipe, groups: Groups) -> Tensor | None:
    """On rank 0 the whole tensor, on CPU; None elsewhere. Collective over all ranks.

    One rank of each set of copies sends its slice to rank 0, which writes it where the recipe says.
    """
    holders = _holders(line, recipe)
    slices = {rank: recipe.held(line, rank) for rank in holders}
    if groups.rank == 0:
        whole = torch.empty(line.shape, dtype=local.dtype)
        for rank in holders:
            shape = [sum(stop - start for start, stop in ranges) for ranges in slices[rank]]
            piece = local if rank == groups.rank else torch.empty(shape, dtype=local.dtype, device=groups.device)
            if rank != groups.rank and piece.numel():
                dist.recv(piece, src=rank)
            if piece.numel():
                place_slices(whole, slices[rank], piece.to("cpu"))
        return whole
    if groups.rank in holders and local.numel():
        dist.send(local.contiguous(), dst=0)
    return None


def _holders(line: ParameterRecipe, recipe: Recipe) -> list[int]:
    """The first rank of each set that holds the same slice."""
    first: dict[Any, int] = {}
    for rank in range(recipe.mesh.size):
        if recipe.holds(line, rank):
            first.setdefault(recipe.held(line, rank), rank)
    return sorted(first.values())


def whole_tensors(
    model: nn.Module, recipe: Recipe, groups: Groups, pick: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
    """(line, whole value on rank 0) for every parameter; ``pick`` gives the parameter itself, or its gradient.

    Where ``pick`` gives None on a rank, it gives None on every rank that holds the same parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for line in recipe.parameters:
        picked = pick(named[line.name]) if recipe.holds(line, groups.rank) else None
        present = torch.tensor([0 if picked is None else 1], device=groups.device)
        dist.all_reduce(present, dist.ReduceOp.MAX)
        if not present.item():
            yield line, None
            continue
        local = local_tensor(named[line.name] if picked is None else picked).detach()
        if picked is None and recipe.holds(line, groups.rank):
            local = torch.zeros_like(local)
        yield line, gather_whole(line, local, recipe, groups)
