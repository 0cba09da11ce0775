"""``pipelined``: the seconds of a step of a pipeline, from the seconds of its ranks; and how many microbatches are in flight.

The schedules are 1F1B, interleaved 1F1B and zero bubble (ZB-H1); estimate.py has their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from meshwright.schedule import microbatches_held
from meshwright.search.space import Candidate


def pipelined(candidate: Candidate, times: Sequence[float], send: float, weights: Sequence[float] = ()) -> float:
    """Seconds from the first forward to the last backward.

    (M − 1) P + T + fill: the first microbatch passes all ranks forward and backward; each period P another one follows.

        fill = (Σ of all ranks' T − T) / v + 2 (p − 1) v send

    With split backwards, a rank computes its weight gradients, W, while it would be idle. So the fill shrinks by up to 2 W for
    each other rank (ZB-H1: (p − 1) (F + I − W), with T = F + I + W and I the gradients of inputs).

        fill = Σ over the others of max(0, T − 2 W) + 2 (p − 1) send

    Args:
        candidate: the plan.
        times: seconds of each rank of the pipeline axis for the forward and backward of all of its stages. T is the longest.
        send: seconds of a send from a rank to the next.
        weights: seconds of weight gradients of each rank, W. Empty: backwards are not split.
    """
    most, sends = max(times), 2 * (candidate.pp - 1) * candidate.chunks * send
    waited = [max(0.0, time - 2 * weight) for time, weight in zip(times, weights or [0.0] * len(times), strict=True)]
    fill = (sum(waited) - waited[times.index(most)]) / candidate.chunks
    return (candidate.microbatches - 1) * period(candidate, times, send) + most + fill + sends


def period(candidate: Candidate, times: Sequence[float], send: float) -> float:
    """Seconds from one microbatch to the next.

    A rank may have only ``in flight`` microbatches. Each returns to the rank after all later ranks have computed its
    forward and backward, and after the sends there and back.

        max over r of T of r, and of (Σ of T from r on + 2 (sends behind r)) / in flight(r)
    """
    last = candidate.pp * candidate.chunks - 1
    rank_indices = range(candidate.pp) if candidate.chunks == 1 else (0,)
    later = [*accumulate(reversed(times))][::-1]
    returns = ((later[r] + 2 * (last - r) * send) / in_flight(candidate, r) for r in rank_indices)
    return max(*times, *returns)


def in_flight(candidate: Candidate, before: int) -> float:
    """The number of microbatches whose activations a rank stores at the peak. ``before``: ranks before it in the pipeline."""
    if candidate.chunks == 1:
        return microbatches_held(candidate.schedule, candidate.pp, candidate.pp, candidate.microbatches, before)
    return min(
        candidate.microbatches,
        ((candidate.chunks - 1) * candidate.pp + 2 * (candidate.pp - before - 1) + 1) / candidate.chunks,
    )
