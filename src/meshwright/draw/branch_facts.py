"""``BranchFacts``: the facts of one branch in a shard map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.mesh import Mesh
from meshwright.recipe import Recipe


@dataclass(frozen=True)
class BranchFacts:
    """A branch: modules on one submesh.

    Attributes:
        number: of the submesh, as in `ParameterFacts.places`.
        on: the submesh as text, in the plan's form; of a nested branch ``tp[0] of tp[0:3]``.
        parent: number of the submesh around it; 0 is the trunk.
        ranks: all ranks that run the branch, also those of other data ranks.
        mesh: the mesh that the ranks of one slice form.
        modules: (name, numbers of the calls that run in the branch, from 0; empty for all), for each module.
        splits: whether each data rank of the branch's mesh runs a share of the rows; else each runs all rows.
        numel: number of elements of its parameters, each counted once.
        work: of all its ranks, as a share of the work of all branches of its parent; 0 to 1.
        load: work of one of its ranks, as a share of the largest work of a rank of these branches; 0 to 1.
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
        """The facts as plain values, for JSON."""
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
    """The facts of the branch on submesh ``number``."""
    submesh, submesh_of_calls = recipe.places[number], recipe.placed  # name of a module → submesh of each of its calls
    modules = []
    for name in dict.fromkeys(submesh.modules):
        calls = tuple(i for i, of_call in enumerate(submesh_of_calls[name]) if of_call == number)
        runs_all_calls = set(submesh_of_calls[name]) == {number}
        modules.append((name, () if runs_all_calls else calls))
    used = [line for line in recipe.parameters if number in line.places]
    pp_ranks = {pp for line in used for pp in recipe.owners(line)}  # empty if the branch has no parameters
    coordinates = ((rank, recipe.places.at(rank, number)) for rank in range(recipe.mesh.size))
    siblings = [other for other in recipe.branches if other.parent == submesh.parent]
    return BranchFacts(
        number=number,
        on=recipe.places.spelled(number),
        parent=submesh.parent,
        ranks=tuple(rank for rank, at in coordinates if at is not None and (not pp_ranks or at.pp in pp_ranks)),
        mesh=submesh.mesh,
        modules=tuple(modules),
        splits=submesh.splits,
        numel=sum(line.numel for line in used),
        work=submesh.work / max(1, sum(sibling.work for sibling in siblings)),
        load=submesh.load / max(1.0, *(sibling.load for sibling in siblings)),
    )
