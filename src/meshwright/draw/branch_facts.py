"""``BranchFacts``: what a shard map says of one branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.mesh import Mesh
from meshwright.recipe import Recipe


@dataclass(frozen=True)
class BranchFacts:
    """A branch: one place of modules besides the trunk.

    Attributes:
        number: as `ParameterFacts.places` has it.
        on: the slice, as the plan says it; of a nested branch ``tp[0] of tp[0:3]``.
        parent: the number of the place around it; 0 is the trunk.
        ranks: all ranks that run it, also those with other rows of the batch.
        mesh: the axes that the ranks of one slice form.
        modules: what the plan places there: (name, its turns: which of its calls run there, from 0; empty for all).
        splits: whether the data ranks of its own mesh each run their share of the rows; else each runs all.
        numel: elements of the parameters that are used there, each once.
        work: of all its ranks, as a share of that of all branches of its parent; 0 to 1.
        load: work of one of its ranks, as a share of that of the busiest rank of these.
    """

    number: int
    on: str
    parent: int
    ranks: tuple[int, ...]
    mesh: Mesh
    modules: tuple[tuple[str, tuple[int, ...]], ...]
    splits: bool
    numel: int
    work: float
    load: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "number": self.number,
            "on": self.on,
            "parent": self.parent,
            "ranks": list(self.ranks),
            "mesh": dict(self.mesh.axes),
            "modules": [{"name": name, "calls": list(turns)} for name, turns in self.modules],
            "splits": self.splits,
            "numel": self.numel,
            "work": round(self.work, 4),
            "load": round(self.load, 4),
        }


def branch_facts(number: int, recipe: Recipe) -> BranchFacts:
    place, turns = recipe.places[number], recipe.placed
    here = {name: tuple(i for i, p in enumerate(turns[name]) if p == number) for name in dict.fromkeys(place.modules)}
    used = [line for line in recipe.parameters if number in line.places]
    owners = {pp for line in used for pp in recipe.owners(line)}  # of the pipeline; without parameters any
    coordinates = ((rank, recipe.places.at(rank, number)) for rank in range(recipe.mesh.size))
    beside = [p for p in recipe.branches if p.parent == place.parent]
    return BranchFacts(
        number=number,
        on=recipe.places.spelled(number),
        parent=place.parent,
        ranks=tuple(rank for rank, at in coordinates if at is not None and (not owners or at.pp in owners)),
        mesh=place.mesh,
        modules=tuple((name, calls if set(turns[name]) != {number} else ()) for name, calls in here.items()),
        splits=place.splits,
        numel=sum(line.numel for line in used),
        work=place.work / max(1, sum(p.work for p in beside)),
        load=place.load / max(1.0, *(p.load for p in beside)),
    )
