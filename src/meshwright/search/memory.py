"""``MemoryEstimator``: the peak bytes of a candidate's ranks, by arithmetic (see the table of equations in estimate.py)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace

from meshwright.search.calls import line_value
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.pipeline import in_flight
from meshwright.search.ranks import PipelineRanks
from meshwright.search.space import Candidate, Sharding

REDUCED = 4  # bytes per element of a gradient in a reduction: float32


class MemoryEstimator:
    """Bytes of candidates. For the arguments see ``Estimator``.

    Args:
        ranks: the ranks of the pipeline axis.
        share: candidate → activations of a rank / those in ``layer_costs``.
    """

    def __init__(
        self,
        layer_costs: Mapping[Sharding, LayerCosts],
        ranks: PipelineRanks,
        recomputed: float,
        itemsize: int,
        reduced: int,
        share: Callable[[Candidate], float] = lambda candidate: 1.0,
        *,
        gathers: bool,
    ) -> None:
        self._share = share
        self._layer_costs, self._ranks, self._recomputed = layer_costs, ranks, recomputed
        self._itemsize, self._reduced, self._gathers = itemsize, reduced, gathers

    def peak(self, candidate: Candidate) -> float:
        """Peak bytes of the rank that needs most memory: of a pipeline, usually the first or the last."""
        layer_costs, share = self._layer_costs[candidate.sharding], self._share(candidate)
        per_recomputed_block = self._recomputed / (layer_costs.tp if layer_costs.sequence else 1)
        # The activations of one block while it is recomputed. The memory of the loss is free by then.
        recomputing = layer_costs.activations * candidate.rows if candidate.recompute else 0.0
        base, slope = layer_costs.other
        other = base + max(slope * candidate.rows, recomputing)
        peak = 0.0
        for index, (rank, elements) in enumerate(
            zip(self._ranks.of(candidate), self._ranks.elements(candidate), strict=True)
        ):
            full_blocks = min(candidate.saved_blocks, rank.blocks) if candidate.recompute else rank.blocks
            per_row = full_blocks * layer_costs.activations + (rank.blocks - full_blocks) * per_recomputed_block
            ranks_before = candidate.pp - 1 if "last" in rank.ends else index
            microbatches = in_flight(candidate, ranks_before)
            rest = other if "last" in rank.ends else base + recomputing
            activations = microbatches * per_row * candidate.rows + rest
            drained = line_value(layer_costs.drained, candidate.rows) if rank.ends else 0.0
            peak = max(peak, self._peak(candidate, elements, share * activations, share * drained))
        return peak

    def _peak(self, candidate: Candidate, elements: float, activations: float, drained: float) -> float:
        """Peak bytes of a rank, in the forwards and backwards or in the update, whichever needs more.

        Args:
            elements: parameter elements of the rank, before sharding.
            activations: bytes of activations.
            drained: see ``LayerCosts``.
        """
        layer_costs = self._layer_costs[candidate.sharding]
        if candidate.pp == 1 and candidate.reshard and candidate.dp_shard > 1:
            gathered = layer_costs.unsharded
        else:
            cast = self._itemsize != REDUCED or candidate.data > 1
            gathered = elements * self._itemsize if self._gathers and cast else 0.0
        # Accumulated gradients stay unsharded until the backward of the last microbatch.
        gradients = elements * self._reduced if candidate.microbatches > 1 else 0.0
        local_elements = elements / candidate.dp_shard
        return layer_costs.persistent * local_elements + max(
            gradients + max(gathered + activations, drained), layer_costs.updating * local_elements
        )

    def selected(self, candidate: Candidate, capacity: float) -> Candidate | None:
        """The candidate with selective recomputation: as many blocks as fit keep their activations; the others recompute.

        Args:
            candidate: recomputes all blocks.
            capacity: bytes of memory of a rank.

        Returns:
            None if no block can keep its activations, or all can; if the candidate does not recompute all of its blocks; or if
            the blocks do not divide evenly over the stages.
        """
        blocks, chunks = self._layer_costs[candidate.sharding].blocks, candidate.chunks
        if not candidate.recompute or candidate.saved_blocks or blocks % (candidate.pp * chunks):
            return None
        if self.peak(replace(candidate, recompute=False)) <= capacity or self.peak(candidate) > capacity:
            return None
        numbers = range(chunks, blocks // candidate.pp, chunks)  # an equal number in each stage
        fitting = bisect_right(numbers, capacity, key=lambda number: self.peak(replace(candidate, saved_blocks=number)))
        return replace(candidate, saved_blocks=numbers[fitting - 1]) if fitting else None
