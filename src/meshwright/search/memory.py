"""``MemoryEstimator``: the peak bytes of a candidate's ranks, by arithmetic (see the table of equations in estimate.py)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace

from meshwright.search.calls import line_value
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.ranks import PipelineRanks, Rank
from meshwright.search.sizes import DP_SHARD
from meshwright.search.space import Candidate, Sharding
from meshwright.search.step_memory import Temporaries

_OPEN = 2  # transfers of a rank that have begun and not ended: one each way
REDUCED = 4  # bytes per element of a gradient in a reduction: float32


class MemoryEstimator:
    """Bytes of candidates. For the arguments see ``Estimator``.

    Args:
        ranks: the ranks of the pipeline axis.
        sends: bytes per row that a stage of a pipeline sends to the next.
        share: candidate → activations of a rank / those in ``layer_costs``.
    """

    def __init__(
        self,
        layer_costs: Mapping[Sharding, LayerCosts],
        ranks: PipelineRanks,
        recomputed: float,
        sends: float,
        itemsize: int,
        reduced: int,
        share: Callable[[Candidate], float] = lambda candidate: 1.0,
        *,
        gathers: bool,
    ) -> None:
        self._share, self._sends = share, sends
        self._layer_costs, self._ranks, self._recomputed = layer_costs, ranks, recomputed
        self._itemsize, self._reduced, self._gathers = itemsize, reduced, gathers

    def peak(self, candidate: Candidate) -> float:
        """Peak bytes of the rank that needs most memory: of a pipeline, usually the first or the last."""
        elements = self._ranks.elements(candidate)
        return max(
            self._peak(candidate, rank, number)
            for rank, number in zip(self._ranks.of(candidate), elements, strict=True)
        )

    def _peak(self, candidate: Candidate, rank: Rank, elements: float) -> float:
        """Peak bytes of a rank, in the forwards and backwards or in the update, whichever needs more.

        Args:
            rank: the rank of the pipeline axis.
            elements: its parameter elements, before sharding.
        """
        layer_costs = self._layer_costs[candidate.sharding]
        local_elements = elements / candidate.dp_shard
        batch = layer_costs.batch * candidate.rows * candidate.microbatches
        computing, updating = self._computing(candidate, rank, elements), layer_costs.updating * local_elements
        return batch + layer_costs.persistent * local_elements + max(computing, updating)

    def _computing(self, candidate: Candidate, rank: Rank, elements: float) -> float:
        """Bytes at the peak of the forwards and backwards, besides those that live between steps. Arguments: see ``_peak``."""
        layer_costs, stored = self._layer_costs[candidate.sharding], self._stored(candidate, rank)
        last, next_to_last = self._freed(candidate, rank)
        levels = [
            stored + last + self._temporaries(candidate, layer_costs.within, elements, reducing=False),
            stored + next_to_last + self._temporaries(candidate, layer_costs.within, elements),
        ]
        if "last" in rank.ends:
            levels.append(stored + self._temporaries(candidate, layer_costs.full, elements))
        if rank.ends:
            levels.append(self._temporaries(candidate, layer_costs.drained, elements))
        most = max(levels)
        if candidate.microbatches == 1:
            return most
        # Gradients accumulate unsharded until the backward of the last microbatch. If all microbatches are in flight at once,
        # the first backward has none yet.
        all_in_flight = rank.held == rank.blocks * candidate.microbatches
        first = stored / candidate.microbatches if all_in_flight else 0.0
        return max(most, most - first + elements * self._reduced)

    def _stored(self, candidate: Candidate, rank: Rank) -> float:
        """Bytes that a rank stores for the backwards of the microbatches in flight.

        Without a pipeline, what comes before all blocks is part of ``LayerCosts.full``. With sequence parallelism, a stage
        keeps what it receives, beside the part of the sequence that its first block stores. Some transfers are on their way.
        """
        layer_costs = self._layer_costs[candidate.sharding]
        kept = self._kept(candidate, rank) / rank.blocks if rank.blocks else 1.0
        per_recomputed_block = self._recomputed / (layer_costs.tp if layer_costs.sequence else 1)
        per_row = rank.held * (kept * layer_costs.activations + (1 - kept) * per_recomputed_block)
        if candidate.pp > 1:
            # What enters the first block is part of what this block stores.
            before = max(0.0, layer_costs.before - self._sends / (layer_costs.tp if layer_costs.sequence else 1))
            per_row += rank.held_first * before + _OPEN * self._sends
        if layer_costs.tp > 1 and layer_costs.sequence:
            per_row += rank.held_received * self._sends
        return self._share(candidate) * per_row * candidate.rows

    def _freed(self, candidate: Candidate, rank: Rank) -> tuple[float, float]:
        """What a rank stores less, or has in addition, in the backward of its last block and of the one before: bytes.

        A block that recomputes has all activations of its own in addition. The last block keeps its activations, if any does.
        """
        block = self._share(candidate) * self._layer_costs[candidate.sharding].activations * candidate.rows
        kept = self._kept(candidate, rank)
        if kept == rank.blocks:
            return 0.0, -block if kept > 1 else 0.0
        return (0.0, 0.0) if kept else (block, block)

    def _kept(self, candidate: Candidate, rank: Rank) -> int:
        """The number of a rank's blocks that do not recompute: these are spread evenly over all blocks."""
        if not candidate.recompute:
            return rank.blocks
        blocks = self._layer_costs[candidate.sharding].blocks
        return round(rank.blocks * candidate.saved_blocks * candidate.pp / blocks) if blocks else 0

    def _temporaries(
        self, candidate: Candidate, temporaries: Temporaries, elements: float, *, reducing: bool = True
    ) -> float:
        """Bytes of a rank at a peak, besides those that it stores.

        Args:
            elements: see ``_peak``.
            reducing: whether gradients may be in a reduction.
        """
        if candidate.pp == 1 and candidate.reshard and candidate.dp_shard > 1:
            gathered = temporaries.unsharded
        else:
            cast = self._itemsize != REDUCED or candidate.dp_shard > 1
            gathered = elements * self._itemsize if self._gathers and cast else 0.0
        share, rows = self._share(candidate), candidate.rows
        of_units, of_tp = temporaries.communication
        reduced = of_units * self._reduced_share(candidate) if reducing else 0.0
        return gathered + share * (line_value(temporaries.computed, rows) + reduced + of_tp * rows)

    @staticmethod
    def _reduced_share(candidate: Candidate) -> float:
        """The buffers of gathers and reductions / those in a rehearsal, which has other shards: one whole, and one sharded.

        A pipeline gathers before its forwards, and reduces after its backwards.
        """
        if candidate.data == 1 or candidate.pp > 1:
            return 0.0
        shard = 1 / candidate.dp_shard if candidate.dp_shard > 1 else 0.0
        return (1 + shard) / (1 + 1 / DP_SHARD)

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
