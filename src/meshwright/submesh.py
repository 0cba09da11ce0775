"""``Submesh``: ranks on which a part of the model runs, and the mesh that they form.

A *place* is the number of a submesh. Place 0 is the *trunk*: all ranks. A *branch* runs on a slice of its parent's tp axis,
whose ranks form a mesh of their own:

    tp=8   ranks  0 1 | 2 3 4 5 6 7
                  tp[0:2]            block_a: tp=2
                        tp[2:8]      block_b: dp_replicate=3 × tp=2

Branches nest: a slice of the tp axis of a branch is a place too. Outer axes stay: with ``dp_shard=2`` there are two of each
slice, and a parameter of a branch is sharded over both.
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
"""The axes that the mesh of a branch may have."""


@dataclass(frozen=True)
class Submesh:
    """A slice of a tp axis, or the trunk.

    Attributes:
        on: the slice as in the plan: ``tp[0:2]``, of the tp axis of its parent.
        parent: the place of which it is a slice; -1 for the trunk.
        start, stop: its ranks on the parent's tp axis.
        mesh: the mesh that its ranks form.
        modules: the modules that the plan places on it.
        splits: whether the data ranks of its own mesh each run their share of the rows; else each runs all rows.
        work: the cost of a forward of the sample, over all its ranks, as in ``Stage.work``.
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
        """The number of shares into which its own mesh divides the rows."""
        return self.mesh.axis_size("dp_replicate") * self.mesh.axis_size("dp_shard")

    def share(self, rank: int) -> int:
        """The share of the rows, counted from 0, of a rank of its own mesh, if rows are divided."""
        coordinate = self.mesh.coordinate(rank)
        return coordinate.get("dp_replicate", 0) * self.mesh.axis_size("dp_shard") + coordinate.get("dp_shard", 0)

    def divides(self, rows: int | None) -> bool:
        """Whether its data ranks each run a share, if there are so many rows; else each runs all rows."""
        return self.splits and rows is not None and rows >= self.data

    def shares(self, shape: Sequence[int], rows: int | None) -> list[tuple[int, int]] | None:
        """(first row, end) of each share of a tensor of this shape, in a batch of so many rows; None if each rank has all."""
        if not self.divides(rows) or not len(shape) or shape[0] != rows:
            return None
        return bounds(shape[0], self.data)

    @property
    def load(self) -> float:
        """The work of each of its ranks."""
        return self.work / self.tp / (self.data if self.splits else 1)


@dataclass(frozen=True)
class Coordinate:
    """The coordinate of a rank in a place. The data axes combine those of the mesh and of all places around.

    ``share``: which of the place's own shares of the rows the rank has.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    share: int = 0


@dataclass(frozen=True)
class Submeshes:
    """The submeshes by place: the trunk and every branch, each after its parent."""

    mesh: Mesh
    all: tuple[Submesh, ...]

    def __getitem__(self, place: int) -> Submesh:
        return self.all[place]

    def __len__(self) -> int:
        return len(self.all)

    def chain(self, place: int) -> tuple[int, ...]:
        """The place and all places around it, from the trunk inwards."""
        chain = [place]
        while self.all[chain[-1]].parent >= 0:
            chain.append(self.all[chain[-1]].parent)
        return tuple(reversed(chain))

    def spelled(self, place: int) -> str:
        """The place as text: ``tp[0:2]``; of a nested one ``tp[0] of tp[0:3]``; empty for the trunk."""
        return " of ".join(self.all[p].on for p in reversed(self.chain(place)[1:]))

    def child(self, place: int, within: int) -> int:
        """The child of place ``within`` that contains ``place``, or is it."""
        chain = self.chain(place)
        return chain[chain.index(within) + 1]

    def axis_size(self, place: int, axis: str) -> int:
        """The size of an axis in a place. A data axis is multiplied by its sizes in all places around; tp is not."""
        if axis == "tp":
            return self.all[place].tp
        size = self.mesh.axis_size(axis)
        for p in self.chain(place)[1:]:
            size *= self.all[p].mesh.axis_size(axis) if axis != "pp" else 1
        return size

    def at(self, rank: int, place: int = 0) -> Coordinate | None:
        """The coordinate of a rank in a place; None if the rank does not belong to it."""
        if (rank, place) not in self._coordinates:
            self._coordinates[rank, place] = self._at(rank, place)
        return self._coordinates[rank, place]

    @cached_property
    def _coordinates(self) -> dict[tuple[int, int], Coordinate | None]:
        """A cache for ``at``."""
        return {}

    def _at(self, rank: int, place: int) -> Coordinate | None:
        """``at``, without the cache: goes from the trunk inwards, from one slice to the next."""
        indices = self.mesh.coordinate(rank)
        coordinate = Coordinate(*(indices.get(axis, 0) for axis in ("pp", *INNER)))
        for p in map(self.all.__getitem__, self.chain(place)[1:]):
            if not p.start <= coordinate.tp < p.stop:
                return None
            inner = p.mesh.coordinate(coordinate.tp - p.start)
            replicate, shard = inner.get("dp_replicate", 0), inner.get("dp_shard", 0)
            coordinate = Coordinate(
                coordinate.pp,
                coordinate.dp_replicate * p.mesh.axis_size("dp_replicate") + replicate,
                coordinate.dp_shard * p.mesh.axis_size("dp_shard") + shard,
                inner.get("tp", 0),
                p.share(coordinate.tp - p.start),
            )
        return coordinate

    def of(self, rank: int) -> frozenset[int]:
        """The places to which a rank belongs."""
        return frozenset(p for p in range(len(self.all)) if self.at(rank, p) is not None)

    def members(self, place: int, rank: int) -> list[int]:
        """For each rank on the tp axis of the place's parent, in the line of ``rank``: its share of the place's rows; -1 if it
        does not belong to the place."""
        line = self.line(self.all[place].parent, rank)
        coordinates = [self.at(r, place) for r in line]
        return [-1 if c is None else c.share for c in coordinates]

    def line(self, place: int, rank: int) -> list[int]:
        """The ranks that differ from ``rank`` only on the tp axis of a place, to which ``rank`` belongs; in order."""
        coordinate = self.at(rank, place)
        assert coordinate is not None
        line = []
        for r in range(self.mesh.size):
            other = self.at(r, place)
            if other is not None and (other.pp, other.dp_replicate, other.dp_shard) == (
                coordinate.pp, coordinate.dp_replicate, coordinate.dp_shard
            ):  # fmt: skip
                line.append((other.tp, r))
        return [r for _, r in sorted(line)]

    @cached_property
    def branches(self) -> tuple[int, ...]:
        """All places except the trunk."""
        return tuple(range(1, len(self.all)))


def trunk(mesh: Mesh) -> Submesh:
    """The submesh of all modules that the plan does not place."""
    size = mesh.axis_size("tp")
    return Submesh("", -1, 0, size, Mesh((("tp", size),)))


def bounds(rows: int, pieces: int) -> list[tuple[int, int]]:
    """(first row, end) of each piece, if rows are divided into pieces that are as even as possible, the longer ones first.

    >>> bounds(5, 2)
    [(0, 3), (3, 5)]
    """
    ends = [rows // pieces * i + min(i, rows % pieces) for i in range(pieces + 1)]
    return list(itertools.pairwise(ends))


def read_slice(on: str) -> tuple[int, int] | None:
    """(start, stop) of a slice: ``tp[2:8]`` → (2, 8); ``tp[3]`` → (3, 4); None for another text."""
    match = SLICE.fullmatch(on.replace(" ", ""))
    if match is None:
        return None
    start = int(match[1])
    return start, int(match[2]) if match[2] else start + 1


__all__ = ["INNER", "SLICE", "Coordinate", "Submesh", "Submeshes", "bounds", "read_slice", "trunk"]
