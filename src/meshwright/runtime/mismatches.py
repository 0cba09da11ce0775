"""Compares what ranks hold with what the recipe says.

each rank     each of its parameters: does the tensor exist, and does it have the shape of its slice?
all ranks     each slice that several ranks have: is it bitwise equal on them?
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from meshwright.mismatch import Mismatch
from meshwright.recipe import ParameterRecipe, Recipe, Slices
from meshwright.runtime.checksum import checksum
from meshwright.runtime.sharded_model import ShardedModel
from meshwright.runtime.weights.parameters import local_tensor


def mismatches(held: ShardedModel) -> tuple[Mismatch, ...]:
    """Every parameter of which a rank holds something else than the recipe says; the same result on all ranks. Collective.

    Shapes are compared with the shape of the slice. Values are compared among the ranks with the same slice: those that differ
    from most of them, or from the first if there is no majority, are reported.
    """
    held.reshard()
    local: dict[str, list[nn.Parameter]] = defaultdict(list)  # name → the object under each name of a tied parameter
    for name, p in held.module.named_parameters(remove_duplicate=False):
        local[held.recipe.by_name[name].name].append(p)
    wrong_shapes = list(_wrong_shapes(local, held.recipe, held.rank))
    reported = {mismatch.parameter for mismatch in wrong_shapes}
    sums = {
        line.name: int(checksum(local_tensor(local[line.name][0])))
        for line in held.recipe.held_by(held.rank)
        if line.name not in reported and held.recipe.copies(line) > 1
    }
    everywhere = [(wrong_shapes, sums)] * dist.get_world_size()
    if len(everywhere) > 1:
        dist.all_gather_object(everywhere, (wrong_shapes, sums))
    shapes = [mismatch for rank_mismatches, _ in everywhere for mismatch in rank_mismatches]
    return (*shapes, *_wrong_values(held.recipe, [rank_sums for _, rank_sums in everywhere]))


def _wrong_shapes(local: Mapping[str, list[nn.Parameter]], recipe: Recipe, rank: int) -> Iterator[Mismatch]:
    """Parameters of this rank that are missing, superfluous, or of another shape than in the recipe."""
    for line in recipe.parameters:
        expected = recipe.held_shape(line, rank) if recipe.holds(line, rank) else None
        shapes = {None if p.is_meta else tuple(local_tensor(p).shape) for p in local.get(line.name, ())} or {None}
        for shape in shapes - {expected}:
            yield Mismatch(rank, line.name, _text(expected, line), _text(shape, line))


def _text(shape: tuple[int, ...] | None, line: ParameterRecipe) -> str:
    """What a rank holds of a parameter, in words."""
    if shape is None:
        return "nothing"
    written = "×".join(map(str, shape)) or "a number"
    return "all of it" if shape == line.shape else f"{written} of {'×'.join(map(str, line.shape))}"


def _wrong_values(recipe: Recipe, sums: Sequence[Mapping[str, int]]) -> Iterator[Mismatch]:
    """Ranks whose values differ from those of the other ranks with the same slice.

    Args:
        sums: for each rank, parameter → checksum.
    """
    for line in recipe.parameters:
        ranks_of: dict[Slices, list[int]] = defaultdict(list)
        for rank in (rank for rank, rank_sums in enumerate(sums) if line.name in rank_sums):
            ranks_of[recipe.held(line, rank)].append(rank)
        for ranks in ranks_of.values():
            majority = Counter(sums[rank][line.name] for rank in ranks).most_common(1)[0][0]
            first = next(rank for rank in ranks if sums[rank][line.name] == majority)
            for rank in ranks:
                if sums[rank][line.name] != majority:
                    yield Mismatch(rank, line.name, f"the values of rank {first}", "other values")


__all__ = ["mismatches"]
