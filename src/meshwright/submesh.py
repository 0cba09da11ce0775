"""``Submesh``: a group of ranks on which a part of the model runs, and the mesh of their own that they form.

The *trunk* is place 0: all ranks. A branch stands on a slice of its parent's tp axis, cut anew:

    tp=8   ranks  0 1 | 2 3 4 5 6 7
                  tp[0:2]            block_a: tp=2
                        tp[2:8]      block_b: dp_replicate=3 × tp=2

Branches nest: a slice of the tp axis of a branch is a place too. Outer axes go on as they are: with ``dp_shard=2`` there
are two of each group, and a parameter of a branch is sharded over both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.mesh import Mesh

SLICE = re.compile(r"tp\[([0-9]{1,4})(?::([0-9]{1,4}))?\]")
INNER = ("dp_replicate", "dp_shard", "tp")
"""The axes that a mesh within a place may have."""


@dataclass(frozen=True)
class Submesh:
    """A slice of an axis.

    Attributes:
        on: as the plan says it: ``tp[0:2]``; of a nested one, a slice of its parent's.
        parent: the number of the place it is a slice of; of the trunk -1.
        start, stop: the parent's tp ranks that it has.
        mesh: the axes that its ranks form.
        modules: what the plan places there.
        splits: whether the data ranks of its own mesh each run their share of the rows; else each runs all.
        work: of all its ranks in a forward of the sample: floating-point operations, and more for each byte moved, as
            stages are weighed.
    """

    on: str
    parent: int
    start: int
    stop: int
    mesh: Mesh
    modules: tuple[str, ...] = ()
    splits: bool = False
    work: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def tp(self) -> int:
        return self.mesh.axis_size("tp")

    @property
    def data(self) -> int:
        """Into how many shares its own mesh divides the rows."""
        return self.mesh.axis_size("dp_replicate") * self.mesh.axis_size("dp_shard")

    def share(self, rank: int) -> int:
        """Which share of the rows one of its ranks, counted from 0, has where they are divided."""
        at = self.mesh.coordinate(rank)
        return at.get("dp_replicate", 0) * self.mesh.axis_size("dp_shard") + at.get("dp_shard", 0)

    def divides(self, rows: int | None) -> bool:
        """Whether its data ranks each run their own of so many rows; else each runs all."""
        return self.splits and rows is not None and rows >= self.data

    def shares(self, shape: Sequence[int], rows: int | None) -> list[tuple[int, int]] | None:
        """The rows of a tensor of this shape that each share has, in a batch of so many; None where each has all of it."""
        if not self.divides(rows) or not len(shape) or shape[0] != rows:
            return None
        return bounds(shape[0], self.data)

    @property
    def load(self) -> float:
        """Work of one of its ranks."""
        return self.work / self.tp / (self.data if self.splits else 1)


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands in a place: on each axis, those of the places around it multiplied in.

    ``share``: which of the place's own shares of the rows is its.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    share: int = 0


@dataclass(frozen=True)
class Submeshes:
    """The trunk and every branch of it, each after its parent."""

    mesh: Mesh
    all: tuple[Submesh, ...]

    def __getitem__(self, place: int) -> Submesh:
        return self.all[place]

    def __len__(self) -> int:
        return len(self.all)

    def chain(self, place: int) -> tuple[int, ...]:
        """The place and all around it, from the trunk inwards."""
        chain = [place]
        while self.all[chain[-1]].parent >= 0:
            chain.append(self.all[chain[-1]].parent)
        return tuple(reversed(chain))

    def spelled(self, place: int) -> str:
        """``tp[0:2]``; of a nested one ``tp[0] of tp[0:3]``; of the trunk nothing."""
        return " of ".join(self.all[p].on for p in reversed(self.chain(place)[1:]))

    def child(self, place: int, within: int) -> int:
        """The child of ``within`` that a place is, or is in."""
        chain = self.chain(place)
        return chain[chain.index(within) + 1]

    def axis_size(self, place: int, axis: str) -> int:
        """The ranks of an axis in a place, those of all places around it multiplied in (but of tp)."""
        if axis == "tp":
            return self.all[place].tp
        size = self.mesh.axis_size(axis)
        for p in self.chain(place)[1:]:
            size *= self.all[p].mesh.axis_size(axis) if axis != "pp" else 1
        return size

    def at(self, rank: int, place: int = 0) -> Coordinate | None:
        """Where a rank stands in a place; None if it is not of it."""
        if (rank, place) not in self._found:
            self._found[rank, place] = self._at(rank, place)
        return self._found[rank, place]

    @cached_property
    def _found(self) -> dict[tuple[int, int], Coordinate | None]:
        return {}

    def _at(self, rank: int, place: int) -> Coordinate | None:
        indices = self.mesh.coordinate(rank)
        here = Coordinate(*(indices.get(axis, 0) for axis in ("pp", *INNER)))
        for p in map(self.all.__getitem__, self.chain(place)[1:]):
            if not p.start <= here.tp < p.stop:
                return None
            inner = p.mesh.coordinate(here.tp - p.start)
            replicate, shard = inner.get("dp_replicate", 0), inner.get("dp_shard", 0)
            here = Coordinate(
                here.pp,
                here.dp_replicate * p.mesh.axis_size("dp_replicate") + replicate,
                here.dp_shard * p.mesh.axis_size("dp_shard") + shard,
                inner.get("tp", 0),
                p.share(here.tp - p.start),
            )
        return here

    def of(self, rank: int) -> frozenset[int]:
        """The places that a rank is of."""
        return frozenset(p for p in range(len(self.all)) if self.at(rank, p) is not None)

    def members(self, place: int, rank: int) -> list[int]:
        """For each tp rank of the place's parent, around ``rank``: the place's share of rows, or -1: it is not of it."""
        line = self.line(self.all[place].parent, rank)
        coordinates = [self.at(r, place) for r in line]
        return [-1 if c is None else c.share for c in coordinates]

    def line(self, place: int, rank: int) -> list[int]:
        """The ranks that differ from ``rank``, which is of the place, on its tp axis alone."""
        here = self.at(rank, place)
        assert here is not None
        line = []
        for r in range(self.mesh.size):
            other = self.at(r, place)
            if other is not None and (other.pp, other.dp_replicate, other.dp_shard) == (
                here.pp, here.dp_replicate, here.dp_shard
            ):  # fmt: skip
                line.append((other.tp, r))
        return [r for _, r in sorted(line)]

    @cached_property
    def branches(self) -> tuple[int, ...]:
        """All but the trunk."""
        return tuple(range(1, len(self.all)))


def trunk(mesh: Mesh) -> Submesh:
    """The place of everything that the plan does not place."""
    size = mesh.axis_size("tp")
    return Submesh("", -1, 0, size, Mesh((("tp", size),)))


def bounds(rows: int, pieces: int) -> list[tuple[int, int]]:
    """``rows`` in ``pieces`` runs as even as can be, the longer first."""
    ends = [rows // pieces * i + min(i, rows % pieces) for i in range(pieces + 1)]
    return list(itertools.pairwise(ends))


def read_slice(on: str) -> tuple[int, int] | None:
    """``tp[2:8]`` → (2, 8); ``tp[3]`` → (3, 4); None for another text."""
    match = SLICE.fullmatch(on.replace(" ", ""))
    if match is None:
        return None
    start = int(match[1])
    return start, int(match[2]) if match[2] else start + 1


__all__ = ["INNER", "SLICE", "Coordinate", "Submesh", "Submeshes", "bounds", "read_slice", "trunk"]
