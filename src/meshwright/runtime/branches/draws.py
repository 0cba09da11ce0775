"""``BranchDraws``: random numbers of branches, which follow from the trunk's and take none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.generators import Generators
from meshwright.runtime.branches.shares import Shares
from meshwright.submesh import Submeshes


class BranchDraws:
    """The generators of this rank, while the trunk runs and within each branch.

    What the trunk draws is what it draws on one device, if branches draw nothing.

    Args:
        random: the generators of this rank.
        shares: which rows this rank runs: data ranks that divide them draw other numbers each.
    """

    def __init__(self, places: Submeshes, rank: int, shares: Shares, random: Generators) -> None:
        self._places, self._mine, self._shares, self._random = places, places.of(rank), shares, random
        self._streams: dict[int, Any] = {}  # branch → its seed, or the state that it has come to
        self._begun_at: Tensor | None = None  # the state of torch's generator when the last forward began

    def begin(self) -> None:
        """A forward begins."""
        self._move_on()
        self._begun_at = torch.get_rng_state()
        seed = int(torch.randint(2**48, (), device="cpu"))
        torch.set_rng_state(self._begun_at)
        rows = self._shares.rows
        branches = [b for b in self._places.branches if b in self._mine]
        self._streams = {
            b: seed + 1009 * b + self._places[b].divides(rows) * self._shares.at(b).share for b in branches
        }

    def finish(self) -> None:
        """The step ends."""
        self._move_on()
        self._begun_at = None

    def _move_on(self) -> None:
        """If the trunk has drawn nothing in a forward, its generator moves on by one draw: the branches' numbers in the next
        forward are others."""
        if self._begun_at is not None and torch.equal(self._begun_at, torch.get_rng_state()):
            torch.randint(2**48, (), device="cpu")

    @contextmanager
    def inside(self, place: int) -> Iterator[None]:
        """For the time of a part of a branch: random numbers are the branch's own, and the trunk's go on after it as before."""
        trunk = self._random.state(held=False)
        known = self._streams.get(place)
        if isinstance(known, int):
            self._random.seed(known)
        elif known is not None:
            self._random.set(known)
        try:
            yield
        finally:
            self._streams[place] = self._random.state(held=False)
            self._random.set(trunk)
