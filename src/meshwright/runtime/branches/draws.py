"""``BranchDraws``: random numbers of branches, seeded from the trunk's generator without taking numbers from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.generators import Generators
from meshwright.runtime.branches.branch_rows import BranchRows
from meshwright.submesh import Submeshes


class BranchDraws:
    """Switches the generators of this rank between the trunk and each branch.

    If branches draw nothing, the trunk draws the numbers of one device.

    Args:
        random: the generators of this rank.
        branch_rows: which rows this rank runs: data ranks that divide rows draw different numbers.
    """

    def __init__(self, places: Submeshes, rank: int, branch_rows: BranchRows, random: Generators) -> None:
        self._places, self._rank_places, self._branch_rows, self._random = places, places.of(rank), branch_rows, random
        self._streams: dict[int, Any] = {}  # branch → its seed, or after its first part the state of its generators
        self._begun_at: Tensor | None = None  # the state of torch's generator when the last forward began

    def begin(self) -> None:
        """Call before a forward."""
        self._advance()
        self._begun_at = torch.get_rng_state()
        seed = int(torch.randint(2**48, (), device="cpu"))
        torch.set_rng_state(self._begun_at)
        rows = self._branch_rows.rows
        branches = [b for b in self._places.branches if b in self._rank_places]
        self._streams = {
            b: seed + 1009 * b + self._places[b].divides(rows) * self._branch_rows.at(b).share for b in branches
        }

    def finish(self) -> None:
        """Call at the end of a step."""
        self._advance()
        self._begun_at = None

    def _advance(self) -> None:
        """Advances the trunk's generator by one draw if the trunk drew nothing in the last forward. Else branches would draw
        the same numbers in the next one."""
        if self._begun_at is not None and torch.equal(self._begun_at, torch.get_rng_state()):
            torch.randint(2**48, (), device="cpu")

    @contextmanager
    def inside(self, place: int) -> Iterator[None]:
        """A context for code of a branch: its random numbers come from the branch's generators, later ones from the trunk's."""
        trunk = self._random.state(held=False)
        state = self._streams.get(place)
        if isinstance(state, int):
            self._random.seed(state)
        elif state is not None:
            self._random.set(state)
        try:
            yield
        finally:
            self._streams[place] = self._random.state(held=False)
            self._random.set(trunk)
