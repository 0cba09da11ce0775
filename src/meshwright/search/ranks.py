"""``PipelineRanks``: which blocks, and how many parameters, each rank of the pipeline axis has in a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from meshwright.search.layer_costs import LayerCosts
from meshwright.search.space import Candidate, Sharding
from meshwright.search.stages import StageBlocks, balanced


@dataclass(frozen=True)
class Rank:
    """``count`` ranks of the pipeline axis with equal work.

    Attributes:
        count: number of these ranks.
        blocks: number of blocks that each of them has.
        ends: ``first`` if it has what comes before all blocks, ``last`` if it has what comes after all blocks.
    """

    count: int
    blocks: int
    ends: tuple[str, ...] = ()


class PipelineRanks:
    """The ranks of the pipeline axis, in groups with equal work.

    Args:
        layer_costs: sharding → the costs of the layers.
        shares: size of tp → the fraction of all parameter elements on the fullest rank, if branches are on slices of tp.
    """

    def __init__(self, layer_costs: Mapping[Sharding, LayerCosts], shares: Mapping[int, float] | None = None) -> None:
        self._layer_costs, self._shares = layer_costs, shares or {}
        self._blocks = cache(self._blocks_of)

    def of(self, candidate: Candidate) -> tuple[Rank, ...]:
        """The ranks of the pipeline axis: the first rank, the ranks between as one entry, and the last rank."""
        if candidate.pp == 1:
            return (Rank(1, self._layer_costs[candidate.sharding].blocks, ("first", "last")),)
        blocks = self._blocks(candidate.sharding, candidate.pp * candidate.chunks, candidate.rows)
        other_stages = (candidate.chunks - 1) * blocks.between  # blocks of a rank's stages but the first or last one
        first = Rank(1, blocks.first + other_stages, ("first",))
        last = Rank(1, blocks.last + other_stages, ("last",))
        if candidate.pp == 2:
            return first, last
        return first, Rank(candidate.pp - 2, candidate.chunks * blocks.between), last

    def elements(self, candidate: Candidate) -> list[float]:
        """The number of parameter elements of each entry of ``of``, before they are sharded over data ranks."""
        if candidate.pp == 1:
            return [self._share(candidate) * self._layer_costs[candidate.sharding].total_elements]
        block, first, last = self.elements_of_parts(candidate)
        ends = {"first": first, "last": last}
        return [rank.blocks * block + sum(ends[end] for end in rank.ends) for rank in self.of(candidate)]

    def elements_of_parts(self, candidate: Candidate) -> tuple[float, float, float]:
        """Parameter elements on one rank of tp: of (a block, the layers before all blocks, the layers after them).

        With branches, the parameters of the fullest rank are divided like those of one device.
        """
        block, first, last = self._layer_costs[candidate.sharding].elements
        share = self._share(candidate)
        return share * block, share * first, share * last

    def _share(self, candidate: Candidate) -> float:
        """Elements of the fullest rank / those of ``LayerCosts``."""
        return self._shares[candidate.tp] if candidate.branches else 1.0

    def _blocks_of(self, sharding: Sharding, stages: int, rows: int) -> StageBlocks:
        """The blocks of each stage. Planning cuts the same way: it balances operations and bytes of the forward."""
        layer_costs = self._layer_costs[sharding]
        forward = layer_costs.forward
        work = [calls.work(rows) for calls in (forward.block, forward.first, forward.last)]
        return balanced(layer_costs.blocks, stages, *work)
