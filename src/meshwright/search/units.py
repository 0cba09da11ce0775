"""``Units``: what FSDP2 does for the units of a candidate besides its collectives: its hooks, and its copies.

A unit is a block, or what is in no block (the root). Without FSDP2, buckets sum the gradients of replicas
(``runtime/weights/buckets.py``), and nothing is copied.

| what | equation | function |
| --- | --- | --- |
| host time of hooks | spans · (host_unit / 4 + 2 host) + copies · host | `Units.host` |
| spans | units (2 F + 4 B + 2 gathers + 2 reductions) | `Units.host` |
| copies of a unit | gathers · (in / shards + out) + M sums | `Units.copies` |

A span is a part of FSDP2's hooks that it names for a profiler (``record_function`` in torch/distributed/fsdp/_fully_shard,
``_fsdp_param_group.py``): a forward has pre_forward and post_forward; a backward pre_backward, the prefetch of the next unit,
the sums of gradients and the reshard; a gather all_gather and all_gather_copy_out; a reduction the wait for the one before and
itself. Without shards FSDP2 gathers nothing, but casts or copies each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from meshwright.hardware.profile import Profile
from meshwright.prediction.clock import SPANS_OF_UNIT
from meshwright.runtime.weights.buckets import BYTES
from meshwright.search.branch_costs import BranchCosts
from meshwright.search.calls import line_value
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.memory import REDUCED
from meshwright.search.ranks import PipelineRanks
from meshwright.search.space import Candidate, Sharding

_SPANS = {"F": 2, "B": 4}  # in a forward, and in a backward, besides those of gathers and reductions


class Units:
    """The FSDP units of candidates.

    Args:
        profile: the hardware.
        layer_costs: sharding → the costs of the layers.
        branches: size of tp → the model's branches on slices of it, if there are any.
        ranks: the ranks of the pipeline axis.
        itemsize: bytes per element in the precision of compute.
        reduced: bytes per element of a gradient in a reduction.
        gathers: whether FSDP2 gathers and casts parameters.
    """

    def __init__(
        self,
        profile: Profile,
        layer_costs: Mapping[Sharding, LayerCosts],
        branches: Mapping[int, BranchCosts],
        ranks: PipelineRanks,
        itemsize: int,
        reduced: int,
        *,
        gathers: bool,
    ) -> None:
        self._profile, self._layer_costs, self._branches, self._ranks = profile, layer_costs, branches, ranks
        self._itemsize, self._reduced, self._gathers = itemsize, reduced, gathers

    @property
    def cast(self) -> bool:
        """Whether FSDP2 casts parameters to the precision of compute; then it holds them in every layout."""
        return self._gathers and self._itemsize < REDUCED

    def held(self, candidate: Candidate) -> bool:
        """Whether FSDP2 holds the parameters, as ``runtime/weights/fsdp.py`` says."""
        over_data = candidate.dp_shard > 1 or (candidate.dp_replicate > 1 and candidate.tp > 1)
        return self.cast or (self._gathers and over_data)

    def number(self, candidate: Candidate) -> float:
        """The number of units of the rank that has most of them: its blocks and the root."""
        blocks = self._layer_costs[candidate.sharding].blocks // candidate.pp + 1
        return blocks * (self._branches[candidate.tp].share_of_tensors if candidate.branches else 1.0)

    def sums(self, candidate: Candidate) -> float:
        """The number of all-reduces over replicas in a step: one for each unit, or for each bucket without FSDP2."""
        if candidate.dp_replicate == 1:
            return 0.0
        if self.held(candidate):
            return self.number(candidate)
        return ceil(max(self._ranks.elements(candidate)) * self._reduced / BYTES)

    def host(
        self, candidate: Candidate, kind: str, *, passes: float = 0.0, gathers: float = 0.0, reductions: float = 0.0
    ) -> float:
        """Seconds of the host in the hooks of all units of a rank.

        Args:
            kind: ``F`` for forwards, ``B`` for backwards.
            passes: number of forwards, or of backwards.
            gathers, reductions: of each unit, in these passes. Without shards a gather is a copy of each parameter.
        """
        if not self.held(candidate):
            return 0.0
        units, profile = self.number(candidate), self._profile
        function = profile.host if kind == "F" else profile.host_backward
        shards = candidate.dp_shard > 1
        spans = units * (_SPANS[kind] * passes + 2 * (gathers * shards + reductions))
        copies = gathers * (2 * units if shards else (1 + self.cast) * self._tensors(candidate)) + reductions * units
        return spans * (profile.unit / SPANS_OF_UNIT + 2 * function) + copies * function

    def copies(self, candidate: Candidate, elements: float, gathers: int) -> float:
        """Seconds of copies on the device in a step: casts, copies into and out of the buffers of gathers, sums of the
        gradients of microbatches, and copies into the buffers of reductions.

        Args:
            elements: parameter elements of the rank, before sharding.
            gathers: number of gathers of each unit in a step.
        """
        itemsize, reduced, later_microbatches = self._itemsize, self._reduced, candidate.microbatches - 1
        adds = itemsize + reduced + later_microbatches * (itemsize + 2 * reduced)
        if later_microbatches:
            adds += 2 * reduced
        units, shards = self.number(candidate), candidate.dp_shard > 1
        seconds = units * self._copy(adds * elements / units)
        if self.held(candidate):
            cast = REDUCED + itemsize if self.cast else 0
            sizes = (cast, 2 * itemsize, 2 * itemsize * candidate.dp_shard) if shards else (cast, 2 * itemsize)
            tensors = units if shards else self._tensors(candidate)  # without shards each parameter by itself
            each = elements / tensors / candidate.dp_shard
            seconds += gathers * tensors * sum(self._copy(size * each) for size in sizes if size)
        return seconds

    def _copy(self, nbytes: float) -> float:
        """Seconds of one copy that reads and writes so many bytes in all."""
        return self._profile.compute(0.0, nbytes, "float32", "other").seconds

    def _tensors(self, candidate: Candidate) -> float:
        """The number of parameters of the rank that has most of them."""
        if candidate.branches:
            return self._branches[candidate.tp].tensors
        layer_costs = self._layer_costs[candidate.sharding]
        return line_value(layer_costs.tensors, layer_costs.blocks / candidate.pp)
