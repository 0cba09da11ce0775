"""``Traffic``: calls and bytes of the collectives of one rank.

It has two counts of bytes. ``Traffic.bytes`` are bytes of the rank's inputs, as a job's ledger counts them (spmd/comm.py).
``BranchCollective.nbytes`` are bytes of the full tensor, from which ``hardware.collectives`` computes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.graph import ModelGraph, Value
from meshwright.hardware.collectives import CollectiveKind, collective, neighbours
from meshwright.hardware.profile import Profile
from meshwright.regions import Fork, Join, gradient_returns, row_parts
from meshwright.submesh import Submeshes


class BranchCollective(NamedTuple):
    """One collective.

    ``kind`` and ``nbytes``: as for ``hardware.collective``; ``ranks``: number of ranks; ``apart``: distance from one rank
    to the next.
    """

    kind: CollectiveKind
    nbytes: float
    ranks: int
    apart: int = 1


@dataclass(frozen=True)
class Traffic:
    """The collectives of one rank.

    Attributes:
        calls: number of collectives.
        bytes: bytes of the rank's inputs.
        moves: each collective.
    """

    calls: int = 0
    bytes: int = 0
    moves: tuple[BranchCollective, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.moves + other.moves)

    def scaled(self, factor: float) -> Traffic:
        """As many collectives of ``factor`` times the bytes."""
        if factor == 1.0:
            return self
        moves = tuple(BranchCollective(kind, factor * size, ranks, apart) for kind, size, ranks, apart in self.moves)
        return Traffic(self.calls, round(factor * self.bytes), moves)

    def seconds(self, profile: Profile) -> float:
        """Seconds of all these collectives, one after another."""
        return sum(
            collective(profile, kind, nbytes, neighbours(profile, ranks, apart)).seconds
            for kind, nbytes, ranks, apart in self.moves
        )


NOTHING = Traffic()


def all_reduce(size: int, ranks: int, apart: int = 1) -> Traffic:
    """The traffic of one all-reduce of ``size`` bytes."""
    return Traffic(1, size, (BranchCollective("all_reduce", size, ranks, apart),)) if ranks > 1 else NOTHING


def all_gather(size: int, ranks: int) -> Traffic:
    """The traffic of one all-gather of ``size`` bytes from each rank."""
    return Traffic(1, size, (BranchCollective("all_gather", ranks * size, ranks),)) if ranks > 1 else NOTHING


def _all_to_all(sent: int, received: int, ranks: int) -> Traffic:
    """The traffic of an uneven all-to-all in which this rank sends and receives so many bytes.

    It takes as long as an even all-to-all in which each rank sends the larger of both numbers.
    """
    nbytes = max(sent, received) * ranks / (ranks - 1) if ranks > 1 else 0.0
    return Traffic(1, sent, (BranchCollective("all_to_all", nbytes, ranks),))


def fork_traffic(
    graph: ModelGraph, forks: Iterable[Fork], around: int, places: Submeshes, rows: int | None
) -> list[Traffic]:
    """The traffic of the backward of forks, for each tp rank of the place around them (runtime/branches/exchange.py).

    Each fork sums the gradients of its values: one all-reduce for each dtype. Gradients of values that other branches made are
    returned to the ranks of these branches: one all-to-all.

    Args:
        around: the place around the branches.
        rows: rows of the batch. If a branch's data ranks have rows of their own, a value with this many rows is sent in shares.
    """
    tp_ranks = range(places[around].tp)
    totals = [NOTHING for _ in tp_ranks]
    for fork in forks:
        differentiable = {n: graph.values[n] for n in fork.values if n in graph.live}
        to_reduce = [v for n, v in differentiable.items() if n not in fork.homes]
        reduced = NOTHING
        for dtype in dict.fromkeys(v.dtype for v in to_reduce):
            reduced += all_reduce(sum(v.bytes for v in to_reduce if v.dtype == dtype), len(tp_ranks))
        sent, received = [0] * len(tp_ranks), [0] * len(tp_ranks)
        to_return = [
            (v, fork.homes[n], taker) for n, v in differentiable.items() if n in fork.homes for taker in fork.takers[n]
        ]
        for value, home, taker in to_return:
            shares = [places[branch].shares(value.shape, rows) for branch in (home, taker)]
            for transfer in gradient_returns(_members(home, places), _members(taker, places), *shares):
                if transfer.sender != transfer.receiver:
                    size = _bytes_of_rows(value, transfer.start, transfer.stop)
                    sent[transfer.sender] += size
                    received[transfer.receiver] += size
        returned = [
            _all_to_all(sent_bytes, received_bytes, len(tp_ranks)) if to_return else NOTHING
            for sent_bytes, received_bytes in zip(sent, received, strict=True)
        ]
        totals = [total + reduced + exchanged for total, exchanged in zip(totals, returned, strict=True)]
    return totals


def join_traffic(graph: ModelGraph, join: Join, places: Submeshes, rows: int | None) -> list[Traffic]:
    """The traffic of the forward of a join, for each tp rank of the place around it: one all-to-all."""
    tp_ranks = range(places[join.around].tp)
    sent, received = [0] * len(tp_ranks), [0] * len(tp_ranks)
    for number, branch in join.values:
        takers, value = _takers(number, branch, join, places), graph.values[number]
        for start, stop, owners in row_parts(_members(branch, places), places[branch].shares(value.shape, rows)):
            size = _bytes_of_rows(value, start, stop)
            for rank in takers - set(owners):
                sent[owners[rank % len(owners)]] += size
                received[rank] += size
    if not join.values:
        return [NOTHING for _ in tp_ranks]
    return [
        _all_to_all(sent_bytes, received_bytes, len(tp_ranks))
        for sent_bytes, received_bytes in zip(sent, received, strict=True)
    ]


def _bytes_of_rows(value: Value, start: int, stop: int | None) -> int:
    """Bytes of the rows ``start`` to ``stop`` of a value; of all of it, if ``stop`` is None."""
    return value.bytes if stop is None else value.bytes // value.shape[0] * (stop - start)


def _takers(number: int, branch: int, join: Join, places: Submeshes) -> set[int]:
    """The ranks that get a value of a branch: all; or, if only other branches use it, the ranks of these and of the branch."""
    branches = join.takers.get(number)
    if branches is None:
        return set(range(places[join.around].tp))
    return {rank for place in (branch, *branches) for rank in range(places[place].start, places[place].stop)}


def _members(branch: int, places: Submeshes) -> list[int]:
    """For each tp rank of the place around, the number of its share of a branch's rows; -1 if it does not run the branch."""
    submesh = places[branch]
    shares = [-1] * places[submesh.parent].tp
    for rank in range(submesh.start, submesh.stop):
        shares[rank] = submesh.share(rank - submesh.start)
    return shares
