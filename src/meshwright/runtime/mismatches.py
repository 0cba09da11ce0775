"""What ranks really hold beside what the recipe says they do.

each rank     the tensor that it has of each parameter: is it there, and of the shape of its slice?
all ranks     slices that several ranks hold alike: have they the same bits?
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from meshwright.mismatch import Mismatch
from meshwright.recipe import ParameterRecipe, Recipe, Slices
from meshwright.runtime.checksum import checksum
from meshwright.runtime.held import ShardedModel
from meshwright.runtime.weights.parameters import local_tensor


def mismatches(held: ShardedModel) -> tuple[Mismatch, ...]:
    """Every parameter of which a rank holds something else than the recipe says; the same on all ranks. Collective.

    A shape is compared with that of the slice. Values are compared among the ranks that hold the same slice: those that
    differ from most of them, or from the first if there is no majority, are told.
    """
    held.reshard()
    here: dict[str, list[nn.Parameter]] = defaultdict(list)  # at each place of a tied one
    for name, p in held.module.named_parameters(remove_duplicate=False):
        here[held.recipe.by_name[name].name].append(p)
    wrong = list(_of_rank(here, held.recipe, held.rank))
    known = {one.parameter for one in wrong}
    sums = {
        line.name: int(checksum(local_tensor(here[line.name][0])))
        for line in held.recipe.held_by(held.rank)
        if line.name not in known and held.recipe.copies(line) > 1
    }
    told = [(wrong, sums)] * dist.get_world_size()
    if len(told) > 1:
        dist.all_gather_object(told, (wrong, sums))
    shapes = [one for wrong_there, _ in told for one in wrong_there]
    return (*shapes, *_values(held.recipe, [sums_there for _, sums_there in told]))


def _of_rank(here: Mapping[str, list[nn.Parameter]], recipe: Recipe, rank: int) -> Iterator[Mismatch]:
    """What this rank has, or lacks, otherwise than the recipe says."""
    for line in recipe.parameters:
        expected = recipe.held_shape(line, rank) if recipe.holds(line, rank) else None
        shapes = {None if p.is_meta else tuple(local_tensor(p).shape) for p in here.get(line.name, ())} or {None}
        for shape in shapes - {expected}:
            yield Mismatch(rank, line.name, _text(expected, line), _text(shape, line))


def _text(shape: tuple[int, ...] | None, line: ParameterRecipe) -> str:
    if shape is None:
        return "nothing"
    written = "×".join(map(str, shape)) or "a number"
    return "all of it" if shape == line.shape else f"{written} of {'×'.join(map(str, line.shape))}"


def _values(recipe: Recipe, sums: Sequence[Mapping[str, int]]) -> Iterator[Mismatch]:
    """Ranks that hold other values than those with the same slice."""
    for line in recipe.parameters:
        alike: dict[Slices, list[int]] = defaultdict(list)
        for rank in (rank for rank, known in enumerate(sums) if line.name in known):
            alike[recipe.held(line, rank)].append(rank)
        for ranks in alike.values():
            most = Counter(sums[rank][line.name] for rank in ranks).most_common(1)[0][0]
            first = next(rank for rank in ranks if sums[rank][line.name] == most)
            for rank in ranks:
                if sums[rank][line.name] != most:
                    yield Mismatch(rank, line.name, f"the values of rank {first}", "other values")


__all__ = ["mismatches"]
