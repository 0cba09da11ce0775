"""What crosses between ranks: calls and bytes of collectives, of one rank.

Two counts of bytes: ``bytes`` is what the rank puts in, as a job's ledger counts it (spmd/comm.py); ``wire`` is what crosses
its link in the busier direction, which is what takes time. An all-reduce of n bytes over r ranks crosses 2(r−1)/r · n, as a
ring or a tree does (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.graph import ModelGraph
from meshwright.hardware import Hardware
from meshwright.regions import Fork, Join, parts, returns
from meshwright.submesh import Submeshes


@dataclass(frozen=True)
class Traffic:
    """Collectives of one rank; see above."""

    calls: int = 0
    bytes: int = 0
    wire: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.wire + other.wire)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(times * self.calls, times * self.bytes, times * self.wire)

    def seconds(self, hardware: Hardware) -> float:
        return self.calls * hardware.latency + self.wire / hardware.link


NOTHING = Traffic()


def all_reduce(size: int, ranks: int) -> Traffic:
    """Of ``size`` bytes."""
    return Traffic(1, size, 2 * (ranks - 1) / ranks * size) if ranks > 1 else NOTHING


def all_gather(size: int, ranks: int) -> Traffic:
    """Of ``size`` bytes on each rank."""
    return Traffic(1, size, (ranks - 1) * float(size)) if ranks > 1 else NOTHING


def fork_traffic(
    graph: ModelGraph, forks: Iterable[Fork], around: int, places: Submeshes, rows: int | None
) -> list[Traffic]:
    """The backward of forks of a place, for each of its tp ranks (runtime/branches/exchange.py): an all-reduce of the
    gradients of each, one for each type; of what other branches made, one all-to-all to their ranks.

    Args:
        rows: of the batch; a value with as many, of a branch whose data ranks have their own, is sent in shares.
    """
    line = range(places[around].tp)
    totals = [NOTHING for _ in line]
    for fork in forks:
        tied = {n: graph.values[n] for n in fork.values if n in graph.live}
        summed = [v for n, v in tied.items() if n not in fork.homes]
        moved = NOTHING
        for dtype in dict.fromkeys(v.dtype for v in summed):
            moved += all_reduce(sum(v.bytes for v in summed if v.dtype == dtype), len(line))
        sent, received = [0] * len(line), [0] * len(line)
        back = [(v, fork.homes[n], taker) for n, v in tied.items() if n in fork.homes for taker in fork.takers[n]]
        for value, home, taker in back:
            shares = [places[branch].shares(value.shape, rows) for branch in (home, taker)]
            for r in returns(_members(home, places), _members(taker, places), *shares):
                if r.sender != r.receiver:
                    size = value.bytes if r.stop is None else value.bytes // value.shape[0] * (r.stop - r.start)
                    sent[r.sender] += size
                    received[r.receiver] += size
        swap = [Traffic(bool(back), out, float(max(out, into))) for out, into in zip(sent, received, strict=True)]
        totals = [before + moved + t for before, t in zip(totals, swap, strict=True)]
    return totals


def join_traffic(graph: ModelGraph, join: Join, places: Submeshes, rows: int | None) -> list[Traffic]:
    """The forward of a join, one all-to-all, for each tp rank of the place around: what it sends; the busier of both ways."""
    line = range(places[join.around].tp)
    sent, received = [0] * len(line), [0] * len(line)
    for number, branch in join.values:
        takers, value = _takers(number, branch, join, places), graph.values[number]
        for start, stop, owners in parts(_members(branch, places), places[branch].shares(value.shape, rows)):
            size = value.bytes if stop is None else value.bytes // value.shape[0] * (stop - start)
            for rank in takers - set(owners):
                sent[owners[rank % len(owners)]] += size
                received[rank] += size
    if not join.values:
        return [NOTHING for _ in line]
    return [Traffic(1, out, float(max(out, into))) for out, into in zip(sent, received, strict=True)]


def _takers(number: int, branch: int, join: Join, places: Submeshes) -> set[int]:
    """The ranks that get a value: all, or where other branches alone take it, theirs; and the branch's own."""
    branches = join.takers.get(number)
    if branches is None:
        return set(range(places[join.around].tp))
    return {r for b in (branch, *branches) for r in range(places[b].start, places[b].stop)}


def _members(branch: int, places: Submeshes) -> list[int]:
    """For each tp rank of the place around, its share of the rows in a branch; -1: it is not of it."""
    place = places[branch]
    shares = [-1] * places[place.parent].tp
    for r in range(place.start, place.stop):
        shares[r] = place.share(r - place.start)
    return shares
