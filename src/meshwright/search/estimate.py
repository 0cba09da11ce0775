"""``Estimator``: seconds and bytes of a candidate, by arithmetic, from the pieces of a model. Equations:

| what | equation | function |
| --- | --- | --- |
| a forward of a rank | max(Σ device + Σ tp, Σ host) | `Estimator._way` |
| blocks of each stage | the most work of a stage is as little as can be | `stages.balanced` |
| a step without a pipeline | M (F + B) + exposed gathers and reductions | `Estimator._flat` |
| a step of a pipeline | (M - 1) P + fill + gather + reduce | `pipelined` |
| its fill with halves of backwards | Σ over the others of max(0, F + B - 2 W), W of weights | `Estimator._pipelined` |
| its period P | max over ranks of (T of all behind it, and sends) / in flight | `_period` |
| copies of a unit | gathers · (in / shards + out) + M sums | `Estimator._copies` |
| the host of a job, on a CPU | job_step + 2 M v job_action + units (gathers + reductions) host_unit | `Estimator._of_job` |
| gathers that compute hides | max(0, n · gather - F), and the first | `Estimator._data` |
| reductions that compute hides | max(n (scatter + gather) + sum, scatter + n · sum) - B, and the last | `Estimator._data` |
| functions beside collectives | contention · min(F + B, gathers and reductions that are hidden) | `Estimator._beside` |
| processes that share cores | max(T, ranks · work / cores) | `Estimator._shared_cores` |
| what lives on a rank | kept · e + max(gathered + gradients + activations, updating · e), e a shard | `Estimator._lives` |
| its activations | in flight · held · rows + other | `Estimator.memory` |
| blocks that keep their activations | as many as fit: equal blocks take equal seconds a byte | `Estimator.selected` |
| microbatches in flight | min(M, p - r), 1F1B; ((v - 1) p + 2 (p - r - 1) + 1) / v interleaved; r ranks before | `_in_flight` |
| the same with halves of backwards | min(M, p) | `_in_flight` |

Sources: PipeDream-flush (arXiv 2006.09503), Megatron-LM (arXiv 2104.04473, section 2.2), zero bubbles (arXiv 2401.10241,
ZB-H1). It ranks; ``predict`` says what the best of them take (``find.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshwright.hardware.collectives import Group, collective, neighbours
from meshwright.hardware.profile import Profile
from meshwright.search.calls import Calls, at
from meshwright.search.pieces import Pieces
from meshwright.search.space import Candidate
from meshwright.search.stages import Cut, balanced

Spent = tuple[float, float, float]
"""Seconds of one microbatch: (device, collectives of tp, host)."""
REDUCED = 4  # bytes of an element of a gradient that is reduced: float32


@dataclass(frozen=True)
class Estimated:
    """What a candidate is estimated to take.

    Attributes:
        seconds: of a step; ``terms``: what they are.
        nbytes: that live on the fullest rank.
        scatter: the standard deviation of the seconds, as a fraction of them: that of the profile and of its links.
    """

    candidate: Candidate
    seconds: float
    nbytes: float
    terms: Mapping[str, float]
    scatter: float = 0.0


@dataclass(frozen=True)
class Rank:
    """``count`` ranks of the pipeline axis that have as many blocks each, and what comes before or after all blocks."""

    count: int
    blocks: int
    ends: tuple[str, ...] = ()


class Estimator:
    """Seconds and bytes of candidates.

    Args:
        pieces: tp → what the model takes with so many ranks of it.
        recomputed: bytes for a row that a block keeps if it is computed again, with one rank of tp.
        sends: bytes between stages for a row.
        itemsize: bytes of an element that is computed in; ``reduced``: of a gradient that is reduced.
        gathers: whether FSDP2 gathers and casts parameters. False: they stand whole in the type that is computed in, with a
            float32 copy in the optimizer, as in Megatron-LM.
    """

    def __init__(
        self,
        profile: Profile,
        pieces: Mapping[int, Pieces],
        recomputed: float,
        sends: float,
        itemsize: int,
        reduced: int = REDUCED,
        *,
        gathers: bool = True,
    ) -> None:
        self._profile, self._pieces = profile, pieces
        self._recomputed, self._sends, self._itemsize = recomputed, sends, itemsize
        self._reduced, self._gathers = reduced, gathers
        self._seconds, self._updates, self._cut = cache(self._seconds_of), cache(self._update_of), cache(self._cut_of)

    def of(self, candidate: Candidate) -> Estimated:
        """What a candidate takes."""
        if candidate.pp == 1:
            (rank,) = self._ranks(candidate)
            terms = self._flat(candidate, self._way(candidate, "F", rank), self._way(candidate, "B", rank), rank.blocks)
        else:
            terms = self._pipelined(candidate)
        terms["clip and optimizer"] = self._update(candidate)
        if shared := self._shared_cores(candidate, terms):
            terms["shared cores"] = shared
        return Estimated(candidate, sum(terms.values()), self.memory(candidate), terms, self._scatter(terms))

    def _scatter(self, terms: Mapping[str, float]) -> float:
        """Σ seconds · scatter of each term, over all seconds: what rests on the same constants errs together (`Estimate`)."""
        profile = self._profile
        links = max(profile.node.scatter, profile.network.scatter if profile.network is not None else 0.0)
        deviation = sum(
            seconds * (links if term in ("tp", "data") else profile.scatter) for term, seconds in terms.items()
        )
        return deviation / sum(terms.values()) if deviation else 0.0

    def selected(self, candidate: Candidate, capacity: float) -> Candidate | None:
        """Of a candidate that recomputes its blocks, the one of which as many keep their activations as fit; None if none
        can, or if all do."""
        blocks, chunks = self._pieces[candidate.tp].blocks, candidate.chunks
        if not candidate.recompute or candidate.kept or blocks % (candidate.pp * chunks):
            return None
        if self.memory(replace(candidate, recompute=False)) <= capacity or self.memory(candidate) > capacity:
            return None
        numbers = range(chunks, blocks // candidate.pp, chunks)  # as many of each stage
        fitting = bisect_right(numbers, capacity, key=lambda kept: self.memory(replace(candidate, kept=kept)))
        return replace(candidate, kept=numbers[fitting - 1]) if fitting else None

    # --- time ---------------------------------------------------------------------------------------------------------

    def _ranks(self, of: Candidate) -> tuple[Rank, ...]:
        """The ranks of the pipeline axis: the first, those between, and the last."""
        if of.pp == 1:
            return (Rank(1, self._pieces[of.tp].blocks, ("first", "last")),)
        cut, more = self._cut(of.tp, of.pp * of.chunks, of.rows), of.chunks - 1
        first, last = (
            Rank(1, cut.first + more * cut.between, ("first",)),
            Rank(1, cut.last + more * cut.between, ("last",)),
        )
        return first, *([Rank(of.pp - 2, of.chunks * cut.between)] if of.pp > 2 else []), last

    def _cut_of(self, tp: int, stages: int, rows: int) -> Cut:
        """As planning cuts: by operations and bytes of the forward."""
        pieces = self._pieces[tp]
        way = pieces.forward
        return balanced(pieces.blocks, stages, way.block.work(rows), way.first.work(rows), way.last.work(rows))

    def _way(self, of: Candidate, kind: str, rank: Rank) -> Spent:
        """(device, tp, host) seconds of one microbatch on a rank."""
        parts = [(rank.blocks, kind, "block"), *((1, kind, end) for end in rank.ends)]
        if kind == "B" and of.recompute:
            parts.append((max(0, rank.blocks - of.kept), "F", "block"))
        spent = [(n, self._seconds(of.tp, way, part, of.rows)) for n, way, part in parts]
        device, exchange, host = (sum(n * one[i] for n, one in spent) for i in range(3))
        return device, exchange, host

    def _of_weights(self, of: Candidate, rank: Rank) -> float:
        """Seconds of the gradients of weights in a rank's backward: of its products half, the other half being gradients of
        inputs."""
        way = self._pieces[of.tp].backward
        parts = [(rank.blocks, way.block), *((1, getattr(way, end)) for end in rank.ends)]
        return sum(n * calls.device(self._profile, of.rows, "matmul") for n, calls in parts) / 2

    def _elements(self, of: Candidate) -> list[float]:
        """Of the parameters, those of each of ``_ranks``, before they are divided over data ranks."""
        pieces = self._pieces[of.tp]
        block, first, last = pieces.elements
        ends = {"first": first, "last": last}
        if of.pp == 1:
            return [pieces.total_elements]
        return [rank.blocks * block + sum(ends[end] for end in rank.ends) for rank in self._ranks(of)]

    def _seconds_of(self, tp: int, kind: str, part: str, rows: int) -> Spent:
        pieces = self._pieces[tp]
        calls: Calls = getattr(pieces.forward if kind == "F" else pieces.backward, part)
        host = self._profile.host if kind == "F" else self._profile.host_backward
        return calls.device(self._profile, rows), calls.exchange(self._profile, rows), calls.host(self._profile, host)

    def _update(self, of: Candidate) -> float:
        """Seconds of clipping and the optimizer."""
        device = max(self._elements(of)) * self._updates(of.tp, of.dp_shard)
        host = at(self._pieces[of.tp].updates, max(rank.blocks for rank in self._ranks(of)))
        host *= self._profile.update(sharded=of.data * of.tp > 1)
        return device + host if self._profile.cores else max(device, host)

    def _update_of(self, tp: int, shards: int) -> float:
        """Seconds of clipping and the optimizer on the device, for an element."""
        return self._pieces[tp].update.device(self._profile, 1 / shards)

    def _shared_cores(self, of: Candidate, terms: Mapping[str, float]) -> float:
        """Seconds by which all ranks' work on the cores of one machine exceeds a step of one."""
        work = sum(seconds for term, seconds in terms.items() if term != "bubble")
        cores = self._profile.cores
        return max(0.0, of.pp * of.data * of.tp * work / cores - sum(terms.values())) if cores else 0.0

    def _microbatch(self, *ways: Spent) -> dict[str, float]:
        """A forward and a backward: the terms of one microbatch."""
        device, tp = (sum(way[i] for way in ways) for i in (0, 1))
        if self._profile.cores:
            return {"compute": device, "tp": tp, "host": sum(way[2] for way in ways)}
        return {"compute": device, "tp": tp, "host": sum(max(0.0, way[2] - way[0] - way[1]) for way in ways)}

    def _flat(self, of: Candidate, forward: Spent, backward: Spent, blocks: int) -> dict[str, float]:
        one = self._microbatch(forward, backward)
        terms = {name: of.microbatches * seconds for name, seconds in one.items()}
        gathers = of.microbatches * 2 if of.reshard else 1
        terms["compute"] += self._copies(of, self._pieces[of.tp].total_elements, gathers)
        terms["host"] += self._of_job(of, gathers)
        if of.data > 1:
            hiding = [sum(self._microbatch(way).values()) for way in (forward, backward)]
            terms["data"] = self._data(of, hiding[0], hiding[1], blocks)
            terms["compute"] += self._beside(of, terms, blocks, gathers)
        return terms

    def _data(self, of: Candidate, forward: float, backward: float, blocks: int) -> float:
        """Seconds of gathers and reductions that nothing runs beside."""
        block, first, last = self._pieces[of.tp].elements
        gather, (scatter, total) = self._gather(of, block), self._reductions(of, block)
        root = self._gather(of, first + last)
        hides = 0.0 if self._profile.cores else 1.0
        gathers = root + max(gather, blocks * gather - hides * forward) if of.dp_shard > 1 else 0.0
        again = max(0.0, blocks * gather - hides * backward) if of.dp_shard > 1 and of.reshard else 0.0
        times = of.microbatches if of.reshard else 1
        scatters = blocks * (scatter + (gather if of.reshard else 0.0))
        # Sums over replicas run beside the reductions of other blocks; on a CPU nothing runs beside anything.
        taken = max(scatters + total, scatter + blocks * total) if hides else scatters + blocks * total
        late = max(scatter + total, taken - hides * backward) - again
        return times * (gathers + again) + max(0.0, late) + self._reduce(of, first + last)

    def _beside(self, of: Candidate, terms: Mapping[str, float], blocks: int, gathers: int) -> float:
        """Seconds that functions take longer because collectives of the data axes run beside them."""
        if not self._profile.contention:
            return 0.0
        block, first, last = self._pieces[of.tp].elements
        moved = sum(
            times * (gathers * (self._gather(of, size) if of.dp_shard > 1 else 0.0) + self._reduce(of, size))
            for times, size in ((blocks, block), (1, first + last))
        )
        return self._profile.contention * min(terms["compute"], max(0.0, moved - terms["data"]))

    def _pipelined(self, of: Candidate) -> dict[str, float]:
        """By the rank of the pipeline axis that has most to do."""
        ranks = self._ranks(of)
        ways = [self._microbatch(self._way(of, "F", rank), self._way(of, "B", rank)) for rank in ranks]
        one = max(ways, key=lambda way: sum(way.values()))
        times = [sum(way.values()) for rank, way in zip(ranks, ways, strict=True) for _ in range(rank.count)]
        weights = [self._of_weights(of, rank) if of.split else 0.0 for rank in ranks for _ in range(rank.count)]
        terms = {name: of.microbatches * seconds for name, seconds in one.items()}
        apart = of.data * of.tp
        send = collective(self._profile, "send", round(self._sends * of.rows), _pair(self._profile, apart)).seconds
        terms["bubble"] = pipelined(of, times, send, weights) - of.microbatches * max(times)
        held = max(self._elements(of))
        terms["compute"] += self._copies(of, held, 1)
        terms["host"] += self._of_job(of, 1)
        if of.data > 1:
            terms["data"] = (self._gather(of, held) if of.dp_shard > 1 else 0.0) + self._reduce(of, held)
        return terms

    def _copies(self, of: Candidate, elements: float, gathers: int) -> float:
        """Seconds of FSDP2's copies: casts into the buffers of so many gathers, out of them, sums of microbatches' gradients,
        and into the buffer of a reduction."""
        held, reduced, later = self._itemsize, self._reduced, of.microbatches - 1
        adds = held + reduced + later * (held + 2 * reduced) + (2 * reduced if later else 0)
        cast = REDUCED + held if held != REDUCED else 0
        copied: list[tuple[float, int]] = [(adds, 1)]
        if self._gathers and (of.data > 1 or cast):
            out = 2 * held if of.dp_shard > 1 else 0
            copied += [(cast / of.dp_shard, gathers), (2 * held / of.dp_shard, gathers), (out, gathers)]
        units = self._pieces[of.tp].blocks // of.pp + 1
        return units * sum(
            times * self._profile.compute(0.0, nbytes * elements / units, "float32", "other").seconds
            for nbytes, times in copied
            if nbytes
        )

    def _of_job(self, of: Candidate, gathers: int) -> float:
        """Seconds of the host that a step takes besides its functions, on a CPU, where nothing runs beside them.

        job_step + 2 M v job_action + units (gathers + reductions) host_unit + 4 M v host_collective for sends and receives
        """
        profile, passes = self._profile, of.microbatches * of.chunks
        if not profile.cores:
            return 0.0
        units = self._pieces[of.tp].blocks // of.pp + 1
        moved = units * ((gathers + 1) * (of.dp_shard > 1) + (of.dp_replicate > 1))
        sends = 4 * passes * profile.host_collective if of.pp > 1 else 0.0
        return (
            profile.job_step
            + 2 * passes * profile.job_action
            + moved * (profile.host_unit or profile.host_collective)
            + sends
        )

    def _gather(self, of: Candidate, elements: float) -> float:
        group = neighbours(self._profile, of.dp_shard, of.tp)
        return collective(self._profile, "all_gather", round(elements * self._itemsize), group).seconds

    def _reduce(self, of: Candidate, elements: float) -> float:
        """Seconds of a reduction over the shards, and then over their replicas."""
        return sum(self._reductions(of, elements))

    def _reductions(self, of: Candidate, elements: float) -> tuple[float, float]:
        """Seconds of a reduction over the shards; and of the sum over their replicas."""
        scatter, total, nbytes = 0.0, 0.0, elements * self._reduced
        if of.dp_shard > 1:
            group = neighbours(self._profile, of.dp_shard, of.tp)
            scatter = collective(self._profile, "reduce_scatter", round(nbytes), group).seconds
        if of.dp_replicate > 1:
            group = neighbours(self._profile, of.dp_replicate, of.tp * of.dp_shard)
            total = collective(self._profile, "all_reduce", round(nbytes / of.dp_shard), group).seconds
        return scatter, total

    # --- memory -------------------------------------------------------------------------------------------------------

    def memory(self, of: Candidate) -> float:
        """Bytes that live on the fullest rank: the first of a pipeline, or the last."""
        pieces = self._pieces[of.tp]
        again = self._recomputed / (of.tp if pieces.sequence else 1)
        within = (
            pieces.held * of.rows if of.recompute else 0.0
        )  # a block that is computed again, when the loss has gone
        base, slope = pieces.other
        other = base + max(slope * of.rows, within)
        most = 0.0
        for place, (rank, elements) in enumerate(zip(self._ranks(of), self._elements(of), strict=True)):
            kept = min(of.kept, rank.blocks) if of.recompute else rank.blocks
            held = kept * pieces.held + (rank.blocks - kept) * again
            before = of.pp - 1 if "last" in rank.ends else place  # ranks of the pipeline
            flight = _in_flight(of, before)
            rest = other if "last" in rank.ends else base + within
            most = max(most, self._lives(of, elements, flight * held * of.rows + rest))
        return most

    def _lives(self, of: Candidate, elements: float, activations: float) -> float:
        """Bytes that live on a rank of so many elements: while it computes, or while it updates them."""
        pieces = self._pieces[of.tp]
        if of.pp == 1 and of.reshard and of.dp_shard > 1:
            gathered = pieces.unsharded
        else:
            cast = self._itemsize != REDUCED or of.data > 1
            gathered = elements * self._itemsize if self._gathers and cast else 0.0
        # Gradients of the microbatches before are whole until the last one's backward.
        before = elements * self._reduced if of.microbatches > 1 else 0.0
        here = elements / of.dp_shard
        return pieces.kept * here + max(gathered + before + activations, pieces.updating * here)


def pipelined(of: Candidate, times: Sequence[float], send: float, weights: Sequence[float] = ()) -> float:
    """Seconds from the first forward to the last backward.

    (M − 1) P + T + fill: a microbatch goes through all ranks and back, and the others follow it, one each period P.

        fill = (Σ of all ranks' T − T) / v + 2 (p − 1) v send

    With backwards in halves the gradients of weights, W, wait until a rank would stand idle: of each other rank neither they
    nor as much again is waited for (ZB-H1: (p − 1) (F + I − W), where T = F + I + W).

        fill = Σ over the others of max(0, T − 2 W) + 2 (p − 1) send

    Args:
        times: of each rank of the pipeline axis, for a forward and a backward of all that it has; T: the longest.
        send: from a rank to the next.
        weights: of each rank, W.
    """
    most, sends = max(times), 2 * (of.pp - 1) * of.chunks * send
    waited = [max(0.0, time - 2 * weight) for time, weight in zip(times, weights or [0.0] * len(times), strict=True)]
    fill = (sum(waited) - waited[times.index(most)]) / of.chunks
    return (of.microbatches - 1) * _period(of, times, send) + most + fill + sends


def _period(of: Candidate, times: Sequence[float], send: float) -> float:
    """Seconds from one microbatch to the next. A rank holds so many of them; each comes back to it from the last stage when all
    ranks behind it have had it, and is sent there and back from rank to rank.

        max over r of T of r, and of (Σ of T from r on + 2 (sends behind r)) / in flight(r)
    """
    last = of.pp * of.chunks - 1
    # Ranks between are alike, so what they say grows, or falls, from one to the next.
    looked_at = (0, 1) if of.chunks == 1 else (0,)
    returns = ((sum(times[r:]) + 2 * (last - r) * send) / _in_flight(of, r) for r in looked_at)
    return max(*times, *returns)


def _in_flight(of: Candidate, before: int) -> float:
    """Microbatches whose activations a rank holds that has so many others before it."""
    if of.pp == 1:
        return 1.0
    if of.chunks == 1:
        return min(of.microbatches, of.pp if of.split else of.pp - before)
    return min(of.microbatches, ((of.chunks - 1) * of.pp + 2 * (of.pp - before - 1) + 1) / of.chunks)


def _pair(profile: Profile, apart: int) -> Group:
    return Group(2, 2 if apart < profile.devices_per_node else 1)
