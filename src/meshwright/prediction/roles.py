"""``Role``: ranks that do the same in a step. One of them is rehearsed for all of them.

Ranks differ if they run other stages or other branches. Ranks along the data axes do the same. Ranks along ``tp`` do the
same if their shares are equally large; the first rank of an axis has the largest share.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from meshwright.layout import Shard
from meshwright.recipe import Recipe


@dataclass(frozen=True)
class Role:
    """Ranks that do the same in a step.

    Attributes:
        rank: the first of these ranks. It is rehearsed.
        ranks: all of them.
        pp_rank: their rank of the pipeline axis.
        name: a name for the reader: ``stage 0``, ``branch tp[0]``, ``every rank``.
    """

    rank: int
    ranks: tuple[int, ...]
    pp_rank: int
    name: str

    @property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def roles_of(recipe: Recipe) -> tuple[Role, ...]:
    """The roles of a recipe, sorted by their first rank."""
    mesh, uneven = recipe.mesh, _uneven(recipe)
    members: dict[Hashable, list[int]] = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        places = tuple(sorted(recipe.places.of(rank))) if recipe.branches else ()
        tp_rank = coordinate.get("tp", 0) if uneven else 0
        members.setdefault((coordinate.get("pp", 0), places, tp_rank), []).append(rank)
    return tuple(
        Role(ranks[0], tuple(ranks), mesh.coordinate(ranks[0]).get("pp", 0), _name(recipe, ranks[0], uneven=uneven))
        for ranks in sorted(members.values())
    )


def _uneven(recipe: Recipe) -> bool:
    """Whether tp ranks have shares of different sizes."""
    shards = [p.tp for p in recipe.parameters if isinstance(p.tp, Shard)]
    return any(len({shard.local(r) for r in range(shard.ranks)}) > 1 for shard in shards)


def _name(recipe: Recipe, rank: int, *, uneven: bool) -> str:
    """The name of a rank's role."""
    coordinate = recipe.mesh.coordinate(rank)
    words = [f"stage {coordinate['pp']}"] if recipe.stages else []
    if recipe.branches:
        branches = [recipe.places.spelled(p) for p in sorted(recipe.places.of(rank)) if p]
        words.append(f"branch {', '.join(branches)}" if branches else "trunk")
    if uneven:
        words.append(f"tp {coordinate.get('tp', 0)}")
    return ", ".join(words) or "every rank"
