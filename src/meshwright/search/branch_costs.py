"""``BranchCosts``: a model whose branches run at the same time, each on a slice of tp, against the model on one device.

    one device    rest ── block_a ── block_b ── rest
    branches      rest ─┬ block_a ┬─ rest                 a rank has the functions of its branch, and a part of the rest
                        └ block_b ┘

Both are computed from one recorded forward (``prediction/branches``). A search has the costs of the layers on one device from
rehearsals (``layer_costs.py``), which have more functions than the recorded forward. So it takes only the ratio from here:

    seconds with branches = seconds on one device · (rest over tp + slowest branch) / (rest + all branches) + exchange
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshwright.hardware.profile import Profile
from meshwright.layout import Shard
from meshwright.prediction.branches.compare import PlannedRegions
from meshwright.recipe import ParameterRecipe

PassSeconds = tuple[float, float, float]
"""Seconds of one forward or backward of a microbatch: (device, collectives over tp, host)."""


@dataclass(frozen=True)
class SlowestRank:
    """What the rank whose branches take longest does in a microbatch, relative to one device.

    Attributes:
        device, host: seconds / seconds on one device, without collectives.
        collectives: number of collectives over tp, forks and joins.
        exchange: their seconds on the device.
    """

    device: float
    host: float
    collectives: int
    exchange: float

    def of_pass(self, seconds: PassSeconds, host_collective: float) -> PassSeconds:
        """Seconds of a forward, or of a backward, with branches. Each has half of the collectives.

        Args:
            seconds: of this forward or backward on one device.
            host_collective: seconds of the host for a collective.
        """
        device, _, host = seconds
        called = self.collectives * host_collective / 2
        return device * self.device, self.exchange / 2, host * self.host + called


@dataclass(frozen=True)
class BranchCosts:
    """The branches of a model at one size of tp.

    Attributes:
        planned: the regions of the branches, in the recorded forward.
    """

    planned: PlannedRegions

    @cached_property
    def share(self) -> float:
        """The fraction of all parameter elements on the tp rank that has most of them."""
        lines = self.planned.recipe.parameters
        most = max(sum(prod(line.local_shape(rank)) for line, rank in on_rank) for on_rank in self._by_rank)
        return most / sum(line.numel for line in lines)

    @cached_property
    def share_of_tensors(self) -> float:
        """The fraction of all parameters, as tensors, on the tp rank that has most of them."""
        return self.tensors / len(self.planned.recipe.parameters)

    @cached_property
    def tensors(self) -> int:
        """The number of parameters on the tp rank that has most of them."""
        return max(map(len, self._by_rank))

    @property
    def _by_rank(self) -> list[list[tuple[ParameterRecipe, int]]]:
        """For each tp rank, the parameters that it has or shares, each with the rank's number among the sharing ones."""
        recipe = self.planned.recipe
        by_rank: list[list[tuple[ParameterRecipe, int]]] = [[] for _ in range(recipe.mesh.axis_size("tp"))]
        for line in recipe.parameters:
            for submesh in (recipe.places[place] for place in line.places):
                for rank in range(submesh.start, submesh.stop):
                    by_rank[rank].append((line, rank - submesh.start))
        return by_rank

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded over tp, within branches or around them."""
        return any(isinstance(line.tp, Shard) for line in self.planned.recipe.parameters)

    def slowest(self, profile: Profile, rows: int) -> SlowestRank:
        """The rank whose branches take longest. ``rows``: of a microbatch on a data rank."""
        scale = rows / self.planned.rows
        costs, regions = self.planned.event_costs(profile), self.planned.costs(profile, scale=scale)
        everywhere = range(len(self.planned.graph.events))
        inside = {position for region in regions for position in region.region.positions}
        outside = [position for position in everywhere if position not in inside]
        tp = self.planned.recipe.mesh.axis_size("tp")
        rest = costs.over_tp(outside, self.planned.shards(tp), tp, scale)
        slowest = sum((region.slowest_branch() for region in regions), rest)
        alone = costs.on_one_device(everywhere, scale)
        return SlowestRank(
            device=slowest.device / alone.device if alone.device else 1.0,
            host=slowest.host / alone.host if alone.host else 1.0,
            collectives=slowest.traffic.calls,
            exchange=slowest.traffic.seconds(profile),
        )
