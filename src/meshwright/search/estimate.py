"""``Estimator``: seconds and bytes of a candidate, by arithmetic, from the costs of its layers. Equations:

| what | equation | function |
| --- | --- | --- |
| the forward of a rank | max(Σ device + Σ tp, Σ host) | `Estimator._pass_seconds` |
| blocks of each stage | minimize the work of the largest stage, then its memory | `StageCuts` |
| a step without a pipeline | M (F + B) + exposed gathers and reductions | `Estimator._without_pipeline` |
| a step of a pipeline | (M - 1) P + fill + gather + reduce | `pipelined` |
| its fill with split backwards (zero bubble) | Σ over the other ranks of max(0, F + B - 2 W), W for weights | `pipelined` |
| its period P | max over ranks of (Σ T of this and later ranks + sends) / in flight | `period` |
| host time of a job, on a CPU | job_step + 2 M v job_action + hooks of FSDP units | `Estimator._job_host` |
| the same on an accelerator | added to the host of the forwards and backwards | `Estimator._pass_host`, `_once_host` |
| exposed gathers | max(0, n · gather - F), and the first | `Estimator._exposed_data` |
| exposed reductions | max(n (scatter + gather) + sum, scatter + n · sum) - B, and the last | `Estimator._exposed_data` |
| compute slowed by overlap | contention · min(F + B, hidden gathers and reductions) | `Estimator._contention` |
| branches at the same time | on one device · (rest + slowest branch) / (rest + all) + exchange | `BranchCosts.slowest` |
| ranks that share CPU cores | max(T, ranks · work / cores) | `Estimator._shared_cores` |
| ranks that wait for each other | T · skew(T / collectives and receives) | `Estimator._synchronizations` |
| peak memory of a rank | batch + persistent · e + max(gradients + stored + other, updating · e) | `MemoryEstimator` |
| what its stages store | Σ in flight · (activations + received over tp) · rows + 2 sent | `MemoryEstimator._stored` |
| other bytes, at each of three peaks | gathered + computed + communication | `MemoryEstimator._temporaries` |
| blocks that keep their activations | as many as fit: each block saves equal seconds per byte | `MemoryEstimator.selected` |
| microbatches in flight | 1F1B: min(M, p - r); interleaved: ((v - 1) p + 2 (p - r - 1) + 1) / v | `in_flight` |
| microbatches in flight with split backwards | min(M, p) | `in_flight` |

Here e is the number of elements of a rank's shards, and r the number of ranks before a rank in the pipeline.
Of other files are `StageCuts` (stages.py), `pipelined`, `period`, `in_flight` (pipeline.py), `MemoryEstimator` (memory.py),
`BranchCosts` (branch_costs.py), and `Units` (units.py), which has the hooks and copies of FSDP2.

Sources: PipeDream-flush (arXiv 2006.09503), Megatron-LM (arXiv 2104.04473, section 2.2), zero bubbles (arXiv 2401.10241,
ZB-H1). The estimates rank the candidates; ``predict`` then rehearses the best of them (``find.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from meshwright.hardware.collectives import Group, collective, neighbours
from meshwright.hardware.profile import PRODUCTS, Profile
from meshwright.search.branch_costs import BranchCosts, PassSeconds, SlowestRank
from meshwright.search.calls import Calls, line_value
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.memory import REDUCED, MemoryEstimator
from meshwright.search.pipeline import pipelined
from meshwright.search.ranks import Cuts, PipelineRanks, Rank
from meshwright.search.space import Candidate, Sharding
from meshwright.search.units import Units

TRIED_ROWS = (1, 32)  # of a microbatch
_WAITS = ("bubble", "shared cores", "waiting for other ranks")  # terms of a step in which a rank computes nothing


@dataclass(frozen=True)
class CandidateEstimate:
    """The estimated time and memory of a candidate.

    Attributes:
        candidate: the candidate.
        seconds: of a step: the sum of ``terms``.
        nbytes: peak memory of the rank that needs most.
        terms: name of a part of the step → its seconds.
        scatter: relative standard deviation of ``seconds``, from the scatter of the profile and of its links.
    """

    candidate: Candidate
    seconds: float
    nbytes: float
    terms: Mapping[str, float]
    scatter: float = 0.0


class Estimator:
    """Seconds and bytes of candidates.

    Args:
        profile: the hardware.
        layer_costs: sharding → the costs of the layers.
        recomputed: bytes per row that a block keeps if its forward is recomputed, with tp = 1.
        sends: bytes per row that one stage sends to the next.
        itemsize: bytes per element in the precision of compute.
        reduced: bytes per element of a gradient in a reduction.
        branches: size of tp → the model's branches on slices of it, if there are any.
        cuts: see ``PipelineRanks``.
        gathers: whether FSDP2 gathers and casts parameters. If False, each rank has unsharded parameters in the precision of
            compute, and a float32 copy in the optimizer, as in Megatron-LM.

    Attributes:
        memory: the peak memory of candidates.
        profile: the hardware.
    """

    def __init__(
        self,
        profile: Profile,
        layer_costs: Mapping[Sharding, LayerCosts],
        recomputed: float,
        sends: float,
        itemsize: int,
        reduced: int = REDUCED,
        *,
        branches: Mapping[int, BranchCosts] | None = None,
        cuts: Cuts | None = None,
        gathers: bool = True,
    ) -> None:
        self.profile, self._cuts = profile, cuts
        self._layer_costs, self._recomputed, self._branches = layer_costs, recomputed, branches or {}
        self._sends, self._itemsize = sends, itemsize
        self._reduced, self._gathers = reduced, gathers
        shares = {tp: costs.share for tp, costs in self._branches.items()}
        self._ranks = PipelineRanks(self._layer_costs, shares, cuts)
        self._seconds, self._updates = cache(self._seconds_of), cache(self._update_of)
        self._slowest = cache(self._slowest_of)
        self._units = Units(profile, self._layer_costs, self._branches, self._ranks, itemsize, reduced, gathers=gathers)
        self.memory = MemoryEstimator(
            self._layer_costs, self._ranks, recomputed, sends, itemsize, reduced,
            lambda candidate: self._slowest(candidate.tp, candidate.rows).device if candidate.branches else 1.0,
            gathers=gathers,
        )  # fmt: skip

    def on(self, profile: Profile) -> Estimator:
        """The estimator of the same layers on other hardware."""
        return Estimator(
            profile,
            self._layer_costs,
            self._recomputed,
            self._sends,
            self._itemsize,
            self._reduced,
            branches=self._branches,
            cuts=self._cuts,
            gathers=self._gathers,
        )

    def estimate(self, candidate: Candidate) -> CandidateEstimate:
        """The estimated time and memory of a candidate."""
        if candidate.pp == 1:
            (rank,) = self._ranks.of(candidate)
            forward, backward = (self._pass_seconds(candidate, kind, rank) for kind in "FB")
            terms = self._without_pipeline(candidate, forward, backward, rank.blocks)
        else:
            terms = self._pipelined(candidate)
        terms["clip and optimizer"] = self._update(candidate)
        if shared := self._shared_cores(candidate, terms):
            terms["shared cores"] = shared
        if waiting := self.profile.waiting(sum(terms.values()), self._synchronizations(candidate)):
            terms["waiting for other ranks"] = waiting
        return CandidateEstimate(
            candidate, sum(terms.values()), self.memory.peak(candidate), terms, self._scatter(terms)
        )

    def pays(self, candidate: Candidate, other: Candidate, least: float = 0.0) -> bool:
        """Whether a candidate is faster than another, with few rows in a microbatch or with many.

        ``least``: by how much, as a fraction of the other's seconds.
        """
        seconds = [[self.estimate(replace(each, rows=n)).seconds for each in (candidate, other)] for n in TRIED_ROWS]
        return any(mine < (1 - least) * of_other for mine, of_other in seconds)

    def _scatter(self, terms: Mapping[str, float]) -> float:
        """Relative standard deviation of a step: Σ (seconds · scatter of the term) / Σ seconds.

        The deviations add up linearly, because terms that use the same constants err in the same direction (see `Estimate`).
        """
        profile = self.profile
        links = max(profile.node.scatter, profile.network.scatter if profile.network is not None else 0.0)
        deviation = sum(
            seconds * (links if term in ("tp", "data") else profile.scatter) for term, seconds in terms.items()
        )
        return deviation / sum(terms.values()) if deviation else 0.0

    def _pass_seconds(self, candidate: Candidate, kind: str, rank: Rank) -> PassSeconds:
        """(device, tp, host) seconds of one microbatch on a rank.

        Args:
            kind: ``F`` for the forward, ``B`` for the backward, including the recomputation of forwards.
        """
        parts = [(rank.blocks, kind, "block"), *((1, kind, end) for end in rank.ends)]
        if kind == "B" and candidate.recompute:
            parts.append((max(0, rank.blocks - candidate.saved_blocks), "F", "block"))
        spent = [(number, self._seconds(candidate.sharding, way, part, candidate.rows)) for number, way, part in parts]
        device, exchange, host = (sum(number * seconds[i] for number, seconds in spent) for i in range(3))
        if candidate.branches:
            slowest = self._slowest(candidate.tp, candidate.rows)
            device, exchange, host = slowest.of_pass((device, exchange, host), self.profile.host_collective)
        return device, exchange, host + self._pass_host(candidate, kind, rank)

    def _slowest_of(self, tp: int, rows: int) -> SlowestRank:
        """With branches on slices of ``tp`` ranks: one microbatch on the slowest rank."""
        return self._branches[tp].slowest(self.profile, rows)

    def _weight_gradients(self, candidate: Candidate, rank: Rank) -> float:
        """Seconds per microbatch of the weight gradients of a rank.

        They are half of the matrix products of its backward. The other half are the gradients of inputs.
        """
        backward = self._layer_costs[candidate.sharding].backward
        parts = [(rank.blocks, backward.block), *((1, getattr(backward, end)) for end in rank.ends)]
        return sum(n * calls.device(self.profile, candidate.rows, PRODUCTS) for n, calls in parts) / 2

    def _seconds_of(self, sharding: Sharding, kind: str, part: str, rows: int) -> PassSeconds:
        """(device, tp, host) seconds of one microbatch in one part of the model: ``block``, ``first`` or ``last``."""
        layer_costs = self._layer_costs[sharding]
        calls: Calls = getattr(layer_costs.forward if kind == "F" else layer_costs.backward, part)
        host = self.profile.host if kind == "F" else self.profile.host_backward
        return calls.device(self.profile, rows), calls.exchange(self.profile, rows), calls.host(self.profile, host)

    def _update(self, candidate: Candidate) -> float:
        """Seconds of clipping and the optimizer."""
        device = max(self._ranks.elements(candidate)) * self._updates(candidate.sharding, candidate.dp_shard)
        host = line_value(
            self._layer_costs[candidate.sharding].updates, max(rank.blocks for rank in self._ranks.of(candidate))
        )
        over_tp = candidate.tp > 1
        if candidate.branches:
            branches = self._branches[candidate.tp]
            host, over_tp = host * branches.share_of_tensors, branches.shards
        host *= self.profile.update(dtensors=self._units.cast or candidate.dp_shard > 1 or over_tp)
        return device + host if self.profile.cores else max(device, host)

    def _update_of(self, sharding: Sharding, shards: int) -> float:
        """Seconds of clipping and the optimizer on the device, per element before sharding."""
        return self.profile.update_fraction * self._layer_costs[sharding].update.device(self.profile, 1 / shards)

    def _shared_cores(self, candidate: Candidate, terms: Mapping[str, float]) -> float:
        """Seconds that a step takes longer because all ranks share the cores of one machine; 0.0 on an accelerator."""
        busy_seconds = sum(seconds for term, seconds in terms.items() if term != "bubble")
        ranks, cores = candidate.pp * candidate.data * candidate.tp, self.profile.cores
        return max(0.0, ranks * busy_seconds / cores - sum(terms.values())) if cores else 0.0

    def _synchronizations(self, candidate: Candidate) -> float:
        """How often a rank meets others in a step, as ``predict`` counts it: collectives, receives, clipping."""
        rank, microbatches = max(self._ranks.of(candidate), key=lambda rank: rank.blocks), candidate.microbatches
        units, over_tp = rank.blocks + 1.0, self._collectives_over_tp(candidate, rank)
        gathers = (microbatches if candidate.pp == 1 else 1) * (2 if candidate.reshard and candidate.pp == 1 else 1)
        over_data = units * (gathers + 1) if candidate.dp_shard > 1 else 0
        over_data += self._units.sums(candidate)
        receives = microbatches * candidate.chunks if candidate.pp > 1 else 0
        clipping = candidate.pp * candidate.data * candidate.tp > 1
        return microbatches * over_tp + over_data + receives + clipping

    def at_best(self, estimate: CandidateEstimate) -> float:
        """Seconds of a step that another sharding over the same size of tp may reach.

        It has half of the exchange without sequence parallelism. With k of n chains whole, n - k of the n parts of this are
        left, and the products of the k chains are not divided. The least over all k is taken.
        """
        candidate, terms = estimate.candidate, estimate.terms
        rank = max(self._ranks.of(candidate), key=lambda rank: rank.blocks)
        calls = candidate.microbatches * self._collectives_over_tp(candidate, rank) * self.profile.host_collective
        exchange = terms["tp"] + min(terms["host"], calls)
        shares = sorted(chain.share for chain in self._layer_costs[candidate.sharding].chains)
        undivided = [(candidate.tp - 1) * sum(shares[:k]) * terms["compute"] for k in range(len(shares))]
        left = min((more + exchange / 2 * (1 - k / len(shares)) for k, more in enumerate(undivided)), default=exchange)
        busy = sum(seconds for term, seconds in terms.items() if term not in _WAITS)  # of which the waits are fractions
        return estimate.seconds * (1 - (exchange - left) / busy)

    def _collectives_over_tp(self, candidate: Candidate, rank: Rank) -> float:
        """The number of collectives over tp in the forward and backward of a microbatch."""
        if candidate.branches:
            return self._slowest(candidate.tp, candidate.rows).collectives
        layer_costs = self._layer_costs[candidate.sharding]
        return sum(
            rank.blocks * calls.block.collectives + sum(getattr(calls, end).collectives for end in rank.ends)
            for calls in (layer_costs.forward, layer_costs.backward)
        )

    def _microbatch(self, *passes: PassSeconds) -> dict[str, float]:
        """The terms of one microbatch, summed over its forward and its backward.

        On an accelerator, the term "host" has only the host time that exceeds the time of device and tp.
        """
        device, tp = (sum(seconds[i] for seconds in passes) for i in (0, 1))
        if self.profile.cores:
            return {"compute": device, "tp": tp, "host": sum(seconds[2] for seconds in passes)}
        return {"compute": device, "tp": tp, "host": sum(_waits(host, device, tp) for device, tp, host in passes)}

    def _without_pipeline(
        self, candidate: Candidate, forward: PassSeconds, backward: PassSeconds, blocks: int
    ) -> dict[str, float]:
        """The terms of a step without a pipeline."""
        microbatch = self._microbatch(forward, backward)
        terms = {name: candidate.microbatches * seconds for name, seconds in microbatch.items()}
        gathers = candidate.microbatches * (2 if candidate.reshard else 1)
        terms["compute"] += self._units.copies(candidate, self._ranks.elements(candidate)[0], gathers)
        terms["host"] += self._job_host(candidate, forward, backward)
        if candidate.data > 1:
            hiding = [sum(self._microbatch(seconds).values()) for seconds in (forward, backward)]
            terms["data"] = self._exposed_data(candidate, hiding[0], hiding[1], blocks)
            terms["compute"] += self._contention(candidate, terms, blocks, gathers)
        return terms

    def _exposed_data(self, candidate: Candidate, forward: float, backward: float, blocks: int) -> float:
        """Exposed seconds of gathers and reductions: those that compute does not hide. On a CPU, compute hides nothing."""
        block, first, last = self._ranks.elements_of_parts(candidate)
        gather, (scatter, total) = self._gather(candidate, block), self._reductions(candidate, block)
        root = self._gather(candidate, first + last)
        hides = 0.0 if self.profile.cores else 1.0
        gathers = root + max(gather, blocks * gather - hides * forward) if candidate.dp_shard > 1 else 0.0
        gathers_again = 0.0  # in the backward
        if candidate.dp_shard > 1 and candidate.reshard:
            gathers_again = max(0.0, blocks * gather - hides * backward)
        scatters = blocks * (scatter + (gather if candidate.reshard else 0.0))
        # All-reduces over replicas overlap with reduce-scatters of other blocks; on a CPU nothing overlaps.
        taken = max(scatters + total, scatter + blocks * total) if hides else scatters + blocks * total
        late = max(scatter + total, taken - hides * backward) - gathers_again
        return (
            candidate.microbatches * (gathers + gathers_again) + max(0.0, late) + self._reduce(candidate, first + last)
        )

    def _contention(self, candidate: Candidate, terms: Mapping[str, float], blocks: int, gathers: int) -> float:
        """Seconds that compute takes longer because collectives of the data axes overlap with it."""
        if not self.profile.contention:
            return 0.0
        block, first, last = self._ranks.elements_of_parts(candidate)
        collectives = 0.0
        for units, elements in ((blocks, block), (1, first + last)):
            gather = self._gather(candidate, elements) if candidate.dp_shard > 1 else 0.0
            collectives += units * (gathers * gather + self._reduce(candidate, elements))
        hidden = max(0.0, collectives - terms["data"])
        return self.profile.contention * min(terms["compute"], hidden)

    def _pipelined(self, candidate: Candidate) -> dict[str, float]:
        """The terms of a step with a pipeline. Compute, tp and host are those of the slowest rank of the pipeline axis."""
        # The work of a rank → its forward and backward of one microbatch, the terms of these, and the seconds of weight
        # gradients that a split backward delays. Many ranks have equal work.
        works = [(rank.blocks, rank.ends) for rank in self._ranks.of(candidate)]
        passes, microbatches, delayed = {}, {}, {}
        for work, rank in zip(works, self._ranks.of(candidate), strict=True):
            if work not in passes:
                passes[work] = self._pass_seconds(candidate, "F", rank), self._pass_seconds(candidate, "B", rank)
                microbatches[work] = self._microbatch(*passes[work])
                delayed[work] = self._weight_gradients(candidate, rank) if candidate.split else 0.0
        seconds = {work: sum(microbatch.values()) for work, microbatch in microbatches.items()}
        times, weights = [seconds[work] for work in works], [delayed[work] for work in works]
        slowest = max(works, key=seconds.__getitem__)
        terms = {name: candidate.microbatches * spent for name, spent in microbatches[slowest].items()}
        pair = _pair(self.profile, candidate.data * candidate.tp)
        send = collective(self.profile, "send", round(self._sends * candidate.rows), pair).seconds
        terms["bubble"] = pipelined(candidate, times, send, weights) - candidate.microbatches * max(times)
        elements = max(self._ranks.elements(candidate))
        terms["compute"] += self._units.copies(candidate, elements, 1)
        of_slowest = passes[slowest]
        terms["host"] += self._job_host(candidate, *of_slowest)
        # The other ranks wait for it: no rank begins before the one before it has gathered, or ends before the one after it.
        terms["bubble"] += (candidate.pp - 1) * self._once_host(candidate, *of_slowest)
        if candidate.data > 1:
            gather = self._gather(candidate, elements) if candidate.dp_shard > 1 else 0.0
            terms["data"] = gather + self._reduce(candidate, elements)
        return terms

    def _pass_host(self, candidate: Candidate, kind: str, rank: Rank) -> float:
        """Seconds of the host in each forward (kind ``F``) or backward, besides its functions and collectives over tp.

        On an accelerator: v job_action, each send and receive, and the hooks of units, without a pipeline with their gathers.
        (FSDP2 keeps its root for the backward.) They delay the step where the device does not work meanwhile. 0.0 on a CPU:
        nothing hides them, see `_job_host`.
        """
        profile, chunks = self.profile, candidate.chunks
        if profile.cores:
            return 0.0
        if candidate.pp > 1:
            sends = (2 * chunks - len(rank.ends)) * profile.send
            return chunks * profile.job_action + sends + self._units.host(candidate, kind, passes=1)
        gathers = 1 if kind == "F" else int(candidate.reshard)
        return profile.job_action + self._units.host(candidate, kind, passes=1, gathers=gathers)

    def _job_host(self, candidate: Candidate, forward: PassSeconds, backward: PassSeconds) -> float:
        """Seconds that a step waits for the host, besides its functions and what `_pass_host` counts.

        On a CPU: job_step + 2 M v job_action + hooks of units + sums over replicas · host_collective + 4 M v host_send for
        sends and receives, 2 M less of these over two ranks. On an accelerator: job_step + `_once_host`.

        Args:
            forward, backward: one microbatch.
        """
        profile, microbatches = self.profile, candidate.microbatches
        once = self._once_host(candidate, forward, backward)
        if not profile.cores:
            return profile.job_step + once
        passes, piped = microbatches * candidate.chunks, candidate.pp > 1
        sends = 4 * passes - 2 * microbatches * (candidate.pp == 2) if piped else 0
        gathers = (0, 0) if piped else (microbatches, microbatches * candidate.reshard)
        hooks = sum(
            self._units.host(candidate, kind, passes=microbatches, gathers=number)
            for kind, number in zip("FB", gathers, strict=True)
        )
        return profile.job_step + 2 * passes * profile.job_action + hooks + once + sends * profile.send

    def _once_host(self, candidate: Candidate, forward: PassSeconds, backward: PassSeconds) -> float:
        """Seconds that a rank waits for the host in what it does once a step: the gathers of parameters in its first forward
        of a pipeline, and the reduction of gradients in its last backward.

        On an accelerator, only what exceeds the time of the device in these.
        """
        units = self._units
        gathered = units.host(candidate, "F", gathers=1) if candidate.pp > 1 else 0.0
        reduced = units.host(candidate, "B", reductions=1) + units.sums(candidate) * self.profile.host_collective
        if self.profile.cores:
            return gathered + reduced
        return sum(
            _waits(host + more, device, tp) - _waits(host, device, tp)
            for (device, tp, host), more in ((forward, gathered), (backward, reduced))
        )

    def _gather(self, candidate: Candidate, elements: float) -> float:
        """Seconds of an all-gather of parameters over the shards."""
        group = neighbours(self.profile, candidate.dp_shard, candidate.tp)
        return collective(self.profile, "all_gather", round(elements * self._itemsize), group).seconds

    def _reduce(self, candidate: Candidate, elements: float) -> float:
        """Seconds to reduce gradients over shards and replicas."""
        return sum(self._reductions(candidate, elements))

    def _reductions(self, candidate: Candidate, elements: float) -> tuple[float, float]:
        """Seconds of (reduce-scatter over the shards, all-reduce over the replicas) of gradients."""
        scatter, total, nbytes = 0.0, 0.0, elements * self._reduced
        if candidate.dp_shard > 1:
            group = neighbours(self.profile, candidate.dp_shard, candidate.tp)
            scatter = collective(self.profile, "reduce_scatter", round(nbytes), group).seconds
        if candidate.dp_replicate > 1:
            group = neighbours(self.profile, candidate.dp_replicate, candidate.tp * candidate.dp_shard)
            total = collective(self.profile, "all_reduce", round(nbytes / candidate.dp_shard), group).seconds
        return scatter, total


def _waits(host: float, device: float, tp: float) -> float:
    """Seconds that an accelerator, which takes ``device`` + ``tp`` seconds itself, waits for its host."""
    return max(0.0, host - device - tp)


def _pair(profile: Profile, apart: int) -> Group:
    """Two ranks whose numbers differ by ``apart``: on two nodes if that is at least the devices of a node."""
    return Group(2, 2 if apart < profile.devices_per_node else 1)
