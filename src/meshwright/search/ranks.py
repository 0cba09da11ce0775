"""``PipelineRanks``: which blocks, and how many parameters, each rank of the pipeline axis has in a candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.schedule import held_at_peaks, microbatches_held
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.space import Candidate, Sharding
from meshwright.search.stages import even

_ROUNDS = 4  # of as many microbatches as ranks, which an interleaved schedule takes through all stages of a rank

Cuts = Callable[[Candidate], Sequence[int]]
"""A candidate → the number of blocks of each of its stages."""


@dataclass(frozen=True)
class Rank:
    """A rank of the pipeline axis.

    Attributes:
        blocks: number of its blocks.
        ends: ``first`` if it has what comes before all blocks, ``last`` if it has what comes after all blocks.
        held: number of blocks times microbatches of which it holds the activations.
        held_first: number of microbatches of which it holds the activations of what comes before all blocks.
        held_received: number of microbatches, of all of its stages, of which it holds what it received.
    """

    blocks: int
    ends: tuple[str, ...] = ()
    held: float = 0.0
    held_first: float = 0.0
    held_received: float = 0.0


class PipelineRanks:
    """The ranks of the pipeline axis.

    Args:
        layer_costs: sharding → the costs of the layers.
        shares: size of tp → the fraction of all parameter elements on the fullest rank, if branches are on slices of tp.
        cuts: the blocks of stages. Default: equally many on each.
    """

    def __init__(
        self,
        layer_costs: Mapping[Sharding, LayerCosts],
        shares: Mapping[int, float] | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        self._layer_costs, self._shares = layer_costs, shares or {}
        self._cuts, self._ranks = cuts, cache(self._ranks_of)

    def of(self, candidate: Candidate) -> tuple[Rank, ...]:
        """The ranks of the pipeline axis, in order."""
        blocks = self._layer_costs[candidate.sharding].blocks
        if candidate.pp == 1:
            return (Rank(blocks, ("first", "last"), blocks, 1.0),)
        cuts = self._cuts(candidate) if self._cuts else even(blocks, candidate.pp * candidate.chunks)
        return self._ranks(tuple(cuts), candidate.pp, candidate.schedule, candidate.microbatches)

    def elements(self, candidate: Candidate) -> list[float]:
        """The number of parameter elements of each rank of ``of``, before they are sharded over data ranks."""
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

    @staticmethod
    def _ranks_of(cuts: tuple[int, ...], pp: int, schedule: str, microbatches: int) -> tuple[Rank, ...]:
        """``cuts``: the number of blocks of each stage."""
        ranks = []
        for rank in range(pp):
            blocks = cuts[rank::pp]
            held = max(_held(pp, len(blocks), schedule, microbatches, rank), key=lambda held: _product(held, blocks))
            ends = ("first",) * (rank == 0) + ("last",) * (rank == pp - 1)
            first = held[0] if rank == 0 else 0.0
            ranks.append(Rank(sum(blocks), ends, _product(held, blocks), first, sum(held) - first))
        return tuple(ranks)


@cache
def _held(pp: int, chunks: int, schedule: str, microbatches: int, rank: int) -> list[tuple[float, ...]]:
    """The numbers of microbatches that the stages of a rank hold at its peaks."""
    if chunks > 1:
        # With more microbatches, the same states come again.
        return sorted(held_at_peaks(pp, chunks, min(microbatches, _ROUNDS * pp), rank))
    return [(microbatches_held(schedule, pp, pp, microbatches, rank),)]


def _product(numbers: Sequence[float], others: Sequence[float]) -> float:
    return sum(number * other for number, other in zip(numbers, others, strict=True))
