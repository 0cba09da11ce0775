"""``DrawAgreement``: ranks that run the same forward draw the same random numbers."""

from __future__ import annotations

from meshwright.generators import Generators
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups


class DrawAgreement:
    """What the ranks of a job draw from.

    Args:
        random: the generators of this rank.
    """

    def __init__(self, recipe: Recipe, groups: Groups, random: Generators) -> None:
        self._recipe, self._groups, self._random = recipe, groups, random
        self._differed = 0  # the first step before which ranks had drawn different numbers

    def agree(self, step: int) -> None:
        """Ranks that run the same forward draw the same numbers from here on. Collective."""
        mesh, groups = self._recipe.mesh, self._groups
        agreed = mesh.axis_size("tp") == 1 or self._random.agree(groups.hosts["tp"], torch_too=True)
        if mesh.axis_size("pp") > 1:
            agreed &= self._random.agree(groups.hosts["pp"], torch_too=False)
        if not agreed and not self._differed:
            self._differed = max(1, step)

    @property
    def note(self) -> str:
        """That some ranks had drawn numbers that others had not; empty if that was never so."""
        if not self._differed:
            return ""
        return (
            "something draws random numbers on some ranks only (if rank == 0: torch.rand(1), say), seen before step "
            f"{self._differed}: ranks that run the same forward then took the random state of the first of them"
        )
