"""Which ranks must have the same bits: for each kind of tensor a ``Column``, which assigns ranks to sets of equal ones.
Which parameters and buffers a rank has, and the sums of their checksums by column."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.placeholder import Placeholder
from meshwright.layout import Shard
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.checksum import number_of
from meshwright.runtime.step_notes import is_plain
from meshwright.spmd.tensor import GlobalTensor
from meshwright.watch.report import spelled_ranks

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Column:
    """Sets of ranks. The ranks of one set must have the same bits.

    Attributes:
        sets: for each rank the set that it belongs to; None if it belongs to none.
    """

    sets: tuple[Hashable, ...]

    def differing(self, values: Sequence[Any], without: Collection[int] = ()) -> list[list[list[int]]]:
        """The sets whose ranks have different values.

        Args:
            values: one for each rank.
            without: ranks that are left out of the comparison.

        Returns:
            For each such set the ranks of each value, the value of most ranks first.
        """
        by_set: dict[Hashable, dict[Any, list[int]]] = {}
        for rank, (group, value) in enumerate(zip(self.sets, values, strict=True)):
            if group is not None and rank not in without:
                by_set.setdefault(group, {}).setdefault(value, []).append(rank)
        return [sorted(ranks.values(), key=len, reverse=True) for ranks in by_set.values() if len(ranks) > 1]


def describe_difference(ranks: Sequence[list[int]]) -> str:
    """Says which ranks differ from the majority; ``ranks``: the ranks of each value, the value of most ranks first.

    >>> describe_difference([[0, 2, 3], [1]])
    'rank 1 differs from ranks 0 2 3'
    """
    most, *others = ranks
    verb = "differs" if len(others) == len(others[0]) == 1 else "differ"
    return f"{', '.join(map(spelled_ranks, others))} {verb} from {spelled_ranks(most)}"


def key_of(line: ParameterRecipe, recipe: Recipe) -> Key:
    """The key of a parameter's column. Parameters with the same key have the same sets of equal ranks."""
    owners, sharded = recipe.owners(line), (isinstance(line.tp, Shard), recipe.shards(line) > 1)
    return "parameter", line.places, sharded, owners if len(owners) > 1 else ()


def columns_of(recipe: Recipe) -> dict[Key, Column]:
    """The column of each kind of tensor: of parameters, buffers, and of what the ranks of a tp group compute. Every rank
    has the columns in the same order."""
    columns: dict[Key, Column] = {}
    ranks, places = range(recipe.mesh.size), recipe.places
    for line in recipe.parameters:
        key = key_of(line, recipe)
        if key not in columns:
            columns[key] = Column(tuple(_set_of(line, recipe, rank) for rank in ranks))
    for place in range(len(places)):
        coordinates = [places.at(rank, place) for rank in ranks]
        columns["buffer", place] = Column(tuple(None if c is None else c.pp for c in coordinates))
        if places.axis_size(place, "tp") > 1:
            columns["line", place] = Column(
                tuple(None if c is None else (c.pp, c.dp_replicate, c.dp_shard) for c in coordinates)
            )
    return columns


def _set_of(line: ParameterRecipe, recipe: Recipe, rank: int) -> Hashable:
    """The set of a rank in a parameter's column: ranks of one set hold the same part. None if the rank holds no part."""
    tied = len(recipe.owners(line)) > 1  # several stages hold it
    if tied and not recipe.holds(line, rank):
        return None
    if len(line.places) > 1:  # it is replicated on all ranks of these submeshes
        stage = recipe.mesh.coordinate(rank).get("pp", 0)
        is_held = any(recipe.places.at(rank, place) is not None for place in line.places)
        return (-1 if tied else stage) if is_held else None
    coordinate = recipe.places.at(rank, line.place)
    if coordinate is None:
        return None
    tp = coordinate.tp if isinstance(line.tp, Shard) else -1
    shard = coordinate.dp_shard if recipe.shards(line) > 1 else -1
    return -1 if tied else coordinate.pp, tp, shard


def parameters_of(model: nn.Module, recipe: Recipe, rank: int) -> Iterator[tuple[str, ParameterRecipe, nn.Parameter]]:
    """(name, line of the recipe, parameter) of each parameter of a rank."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for line in recipe.held_by(rank):
        yield line.name, line, named[line.name]


def buffers_of(model: nn.Module, recipe: Recipe, rank: int) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of each buffer of which a rank has a valid copy: its stage runs the module, and it is a plain tensor."""
    for name, b in model.named_buffers():
        if recipe.owns_buffer(name, rank) and not isinstance(b, (Placeholder, GlobalTensor)) and is_plain(b):
            yield name, b


def add_by_column(totals: Tensor, columns: Sequence[int], names: Sequence[str], sums: Sequence[Tensor]) -> None:
    """Adds checksums to the totals of their columns, in place.

    Args:
        totals: int64, at least one number for each column.
        columns, names, sums: of each tensor the number of its column, its name and its checksum, on the device of ``totals``.
    """
    if sums:
        factors = torch.tensor([number_of(name) | 1 for name in names], device=totals.device)
        totals.index_add_(0, torch.tensor(columns, device=totals.device), torch.stack([*sums]) * factors)
