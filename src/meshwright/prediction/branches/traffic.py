"""What crosses between ranks: calls and bytes of collectives, of one rank.

Two counts of bytes: ``bytes`` is what the rank puts in, as a job's ledger counts it (spmd/comm.py); a ``Move`` has those of the
whole tensor, of which ``hardware.collectives`` knows what they take, as it does for every other prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.graph import ModelGraph
from meshwright.hardware.collectives import CollectiveKind, collective, neighbours
from meshwright.hardware.profile import Profile
from meshwright.regions import Fork, Join, parts, returns
from meshwright.submesh import Submeshes


class Move(NamedTuple):
    """One collective: its kind; its bytes, as ``collective`` counts them; its ranks, and how far each is from the next."""

    kind: CollectiveKind
    nbytes: float
    ranks: int
    apart: int = 1


@dataclass(frozen=True)
class Traffic:
    """Collectives of one rank; see above."""

    calls: int = 0
    bytes: int = 0
    moves: tuple[Move, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.moves + other.moves)

    def seconds(self, profile: Profile) -> float:
        """The seconds of all these collectives, one after another."""
        return sum(
            collective(profile, kind, nbytes, neighbours(profile, ranks, apart)).seconds
            for kind, nbytes, ranks, apart in self.moves
        )


NOTHING = Traffic()


def all_reduce(size: int, ranks: int, apart: int = 1) -> Traffic:
    """The traffic of one all-reduce of ``size`` bytes."""
    return Traffic(1, size, (Move("all_reduce", size, ranks, apart),)) if ranks > 1 else NOTHING


def all_gather(size: int, ranks: int) -> Traffic:
    """The traffic of one all-gather of ``size`` bytes from each rank."""
    return Traffic(1, size, (Move("all_gather", ranks * size, ranks),)) if ranks > 1 else NOTHING


def _all_to_all(sent: int, received: int, ranks: int) -> Traffic:
    """In which this rank sends and receives so many bytes; it takes what one takes in which all have the busier of both."""
    busier = max(sent, received) * ranks / (ranks - 1) if ranks > 1 else 0.0
    return Traffic(1, sent, (Move("all_to_all", busier, ranks),))


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
        swap = [
            _all_to_all(out, into, len(line)) if back else NOTHING for out, into in zip(sent, received, strict=True)
        ]
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
    return [_all_to_all(out, into, len(line)) for out, into in zip(sent, received, strict=True)]


def _takers(number: int, branch: int, join: Join, places: Submeshes) -> set[int]:
    """The ranks that get a value: all, or where other branches alone take it, theirs; and the branch's own."""
    branches = join.takers.get(number)
    if branches is None:
        return set(range(places[join.around].tp))
    return {r for b in (branch, *branches) for r in range(places[b].start, places[b].stop)}


def _members(branch: int, places: Submeshes) -> list[int]:
    """For each tp rank of the place around, its share of the rows in a branch; -1: the rank is not one of the branch's."""
    submesh = places[branch]
    shares = [-1] * places[submesh.parent].tp
    for r in range(submesh.start, submesh.stop):
        shares[r] = submesh.share(r - submesh.start)
    return shares
