"""Which ranks hold the same: sets of ranks, a ``Column`` for each kind of thing that they may have in common."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.layout import Shard
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.watch.report import spelled_ranks

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Column:
    """Sets of ranks, each of which holds the same: rank → the set that it is of, or None."""

    sets: tuple[Hashable, ...]

    def differing(self, values: Sequence[Any], without: Collection[int] = ()) -> list[list[list[int]]]:
        """For each set whose ranks have different values: the ranks of each value, the most ranks first.

        Args:
            without: ranks that are not compared.
        """
        by_set: dict[Hashable, dict[Any, list[int]]] = {}
        for rank, (of, value) in enumerate(zip(self.sets, values, strict=True)):
            if of is not None and rank not in without:
                by_set.setdefault(of, {}).setdefault(value, []).append(rank)
        return [sorted(ranks.values(), key=len, reverse=True) for ranks in by_set.values() if len(ranks) > 1]


def told_apart(ranks: Sequence[list[int]]) -> str:
    """In words which ranks differ from the most; ``ranks``: of each value, the most first.

    >>> told_apart([[0, 2, 3], [1]])
    'rank 1 differs from ranks 0 2 3'
    """
    most, *others = ranks
    verb = "differs" if len(others) == len(others[0]) == 1 else "differ"
    return f"{', '.join(map(spelled_ranks, others))} {verb} from {spelled_ranks(most)}"


def key_of(line: ParameterRecipe, recipe: Recipe) -> Key:
    """Parameters with the same key are held alike by the same ranks."""
    owners, shares = recipe.owners(line), (isinstance(line.tp, Shard), recipe.shards(line) > 1)
    return "parameter", line.places, shares, owners if len(owners) > 1 else ()


def columns_of(recipe: Recipe) -> dict[Key, Column]:
    """The sets of ranks of each kind, in an order that is the same on every rank."""
    columns: dict[Key, Column] = {}
    ranks, places = range(recipe.mesh.size), recipe.places
    for line in recipe.parameters:
        key = key_of(line, recipe)
        if key not in columns:
            columns[key] = Column(tuple(_set_of(line, recipe, rank) for rank in ranks))
    for place in range(len(places)):
        at = [places.at(rank, place) for rank in ranks]
        columns["buffer", place] = Column(tuple(None if c is None else c.pp for c in at))
        if places.axis_size(place, "tp") > 1:
            columns["line", place] = Column(
                tuple(None if c is None else (c.pp, c.dp_replicate, c.dp_shard) for c in at)
            )
    return columns


def _set_of(line: ParameterRecipe, recipe: Recipe, rank: int) -> Hashable:
    """Ranks with the same answer hold the same part of a parameter; None: none of it, or it is a stage's that may not."""
    several = len(recipe.owners(line)) > 1
    if several and not recipe.holds(line, rank):
        return None
    if len(line.places) > 1:  # each has it whole
        stage = recipe.mesh.coordinate(rank).get("pp", 0)
        held = any(recipe.places.at(rank, place) is not None for place in line.places)
        return (-1 if several else stage) if held else None
    at = recipe.places.at(rank, line.place)
    if at is None:
        return None
    tp = at.tp if isinstance(line.tp, Shard) else -1
    shard = at.dp_shard if recipe.shards(line) > 1 else -1
    return -1 if several else at.pp, tp, shard
