"""What crosses between ranks: calls and bytes of collectives, of one rank.

Two counts of bytes: ``bytes`` is what the rank puts in, as a job's ledger counts it (view/axis.py); ``wire`` is what crosses
its link in the busier direction, which is what takes time. An all-reduce of n bytes over r ranks crosses 2(r−1)/r · n, as a
ring or a tree does (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.graph import ModelGraph, Value
from meshwright.hardware import Hardware
from meshwright.place import Places
from meshwright.regions import Fork, Join


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


def fork_traffic(graph: ModelGraph, forks: Iterable[Fork], ranks: int) -> Traffic:
    """The backward of forks: an all-reduce of the gradients of each, one for each type (run/branch.py)."""
    found = NOTHING
    for fork in forks:
        tied = [graph.values[n] for n in fork.values if n in graph.live]
        for dtype in dict.fromkeys(v.dtype for v in tied):
            found += all_reduce(sum(v.bytes for v in tied if v.dtype == dtype), ranks)
    return found


def join_traffic(graph: ModelGraph, join: Join, places: Places, rows: int | None) -> list[Traffic]:
    """The forward of a join, one all-to-all, for each tp rank of the place around: what it sends; the busier of both ways.

    Args:
        rows: of the batch; a value with as many, of a branch whose data ranks have their own, is sent in shares.
    """
    line = range(places[join.around].tp)
    sent, received = [0] * len(line), [0] * len(line)
    for number, branch in join.values:
        takers = _takers(number, branch, join, places)
        for size, owners in _pieces(graph.values[number], branch, places, rows):
            for rank in takers - set(owners):
                sent[owners[rank % len(owners)]] += size
                received[rank] += size
    if not join.values:
        return [NOTHING for _ in line]
    return [Traffic(1, out, float(max(out, into))) for out, into in zip(sent, received, strict=True)]


def _takers(number: int, branch: int, join: Join, places: Places) -> set[int]:
    """The ranks that get a value: all, or where other branches alone take it, theirs; and the branch's own."""
    branches = join.takers.get(number)
    if branches is None:
        return set(range(places[join.around].tp))
    return {r for b in (branch, *branches) for r in range(places[b].start, places[b].stop)}


def _pieces(value: Value, branch: int, places: Places, rows: int | None) -> list[tuple[int, Sequence[int]]]:
    """The parts that ranks of a branch have of a value: bytes, and who has it, by their place on the line around."""
    place = places[branch]
    members = {r: place.mesh.coordinate(r - place.start) for r in range(place.start, place.stop)}
    if not place.splits or rows is None or rows < place.data or value.shape[:1] != (rows,):
        return [(value.bytes, tuple(members))]
    shards = place.mesh.axis_size("dp_shard")
    share = {r: c.get("dp_replicate", 0) * shards + c.get("dp_shard", 0) for r, c in members.items()}
    row = value.bytes // rows
    return [
        (row * (rows // place.data + (s < rows % place.data)), tuple(r for r in members if share[r] == s))
        for s in range(place.data)
    ]
