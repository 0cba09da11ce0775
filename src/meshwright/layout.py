"""Layouts: what one rank holds of a tensor along one mesh axis.

    REPLICATE   the full tensor
    Shard       a slice along one tensor dim; if the dim consists of fused blocks (a fused QKV), a slice of each block
    PARTIAL     a summand: the tensor is the sum over the axis
    REMOTE      nothing: the value is on other ranks

A layout is a value: it names no process group and no rank, so that it can be drawn for a mesh that does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Interval = tuple[int, int]


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the full tensor."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "Partial"


@dataclass(frozen=True)
class Remote:
    """This rank holds nothing: the value is on other ranks."""

    def __str__(self) -> str:
        return "Remote"


@dataclass(frozen=True)
class Shard:
    """A slice along tensor dim ``dim``.

    ``pieces[p][r]`` is the number of elements of fused block ``p`` on rank ``r``. An ordinary tensor has one block. A fused QKV
    has three, and each is sharded; the local tensor of a rank is its slices of the blocks, one after another.

    >>> Shard(0, ((3, 2),)).intervals(1)
    ((3, 5),)
    >>> Shard(0, ((2, 2), (2, 2))).intervals(1)
    ((2, 4), (6, 8))
    """

    dim: int
    pieces: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        """Elements of the whole dim."""
        return sum(sum(piece) for piece in self.pieces)

    @property
    def ranks(self) -> int:
        return len(self.pieces[0])

    @property
    def parts(self) -> int:
        return len(self.pieces)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Elements of each fused block."""
        return tuple(sum(piece) for piece in self.pieces)

    def local(self, rank: int) -> int:
        """Elements of the dim that ``rank`` holds."""
        return sum(piece[rank] for piece in self.pieces)

    @cached_property
    def locals(self) -> tuple[int, ...]:
        """Elements of the dim on each rank. (Some functions refuse a local tensor without elements; all ranks must know.)"""
        return tuple(map(self.local, range(self.ranks)))

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """The half-open ranges of the dim that ``rank`` holds, in the order of its local tensor; none empty."""
        intervals, base = [], 0
        for piece in self.pieces:
            start = base + sum(piece[:rank])
            if piece[rank]:
                intervals.append((start, start + piece[rank]))
            base += sum(piece)
        return tuple(intervals)

    def on(self, dim: int) -> Shard:
        """The same pieces along another dim."""
        return self if dim == self.dim else Shard(dim, self.pieces)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The slice of ``whole`` that ``rank`` holds: a view if the slice is one range, else a copy."""
        ranges = self.intervals(rank)
        if not ranges:
            return whole.narrow(self.dim, 0, 0)
        slices = [whole.narrow(self.dim, start, stop - start) for start, stop in ranges]
        return slices[0] if len(slices) == 1 else _cat(slices, self.dim)

    def merge(self, locals_: Sequence[Tensor]) -> Tensor:
        """The full tensor from every rank's slice, in rank order: the inverse of ``take``."""
        if self.parts == 1:
            return _cat(list(locals_), self.dim)
        split = [t.split([piece[r] for piece in self.pieces], self.dim) for r, t in enumerate(locals_)]
        return _cat([split[r][p] for p in range(self.parts) for r in range(self.ranks)], self.dim)

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.parts == 1 else f"Shard({self.dim}, parts={self.parts})"


Layout = Replicate | Partial | Remote | Shard
REPLICATE, PARTIAL, REMOTE = Replicate(), Partial(), Remote()


def shares(size: int, ranks: int, units: int | None = None) -> tuple[int, ...]:
    """The elements on each rank, if ``size`` elements in ``units`` equal pieces that may not be divided are shared over ranks.

    They are the sizes of ``torch.chunk``, as DTensor has them. If these leave a rank without elements although there is a unit
    for each, they are balanced, the larger ones first.

    >>> shares(10, 4), shares(5, 4), shares(12, 2, units=3)
    ((3, 3, 3, 1), (2, 1, 1, 1), (8, 4))
    """
    units = size if units is None else units
    if units <= 0 or size % units:
        raise ValueError(f"{size} elements are not {units} equal units")
    step = -(-units // ranks)
    counts = [max(0, min(step, units - r * step)) for r in range(ranks)]
    if units >= ranks and 0 in counts:
        counts = [units // ranks + (r < units % ranks) for r in range(ranks)]
    return tuple(count * (size // units) for count in counts)


def even_shard(dim: int, blocks: int | Sequence[int], ranks: int, units: int | None = None) -> Shard:
    """An even ``Shard`` of ``dim``, which has one block of that many elements, or several fused blocks.

    ``units``: the number of equal pieces of the dim that may not be divided (attention heads); default: every element.
    """
    blocks = (blocks,) if isinstance(blocks, int) else blocks
    return Shard(dim, tuple(shares(b, ranks, None if units is None else gcd(units, b)) for b in blocks))


def chunked_shard(dim: int, size: int, ranks: int) -> Shard:
    """A ``Shard`` of ``dim`` in chunks, as ``torch.chunk`` divides: what DTensor's ``Shard`` means, and FSDP2 makes."""
    step = -(-size // ranks)
    return Shard(dim, (tuple(max(0, min(step, size - rank * step)) for rank in range(ranks)),))


def regroup(layout: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """The layout of a tensor after a reshape from shape ``before`` to shape ``after``.

    Dims are matched in the smallest groups of equal products. Within the group of the sharded dim, the elements of a rank form
    a pattern over the flattened group; the first dim of ``after`` that can express the pattern is the sharded one. None if no
    dim can: then the reshape mixes elements of different ranks.
    """
    group = reshape_group(layout.dim, before, after)
    if group is None:
        return None
    (lo, hi), (to_lo, to_hi) = group
    inner = _product(before[layout.dim + 1 : hi])
    outer = _product(before[lo : layout.dim])
    flat = [tuple(n * inner for n in piece) for piece in layout.pieces] * outer
    lead = 1
    for dim in range(to_lo, to_hi):
        if pieces := _carry(flat, lead, after[dim], _product(after[dim + 1 : to_hi])):
            return Shard(dim, pieces)
        lead *= after[dim]
    return None


def reshape_group(dim: int, before: Sequence[int], after: Sequence[int]) -> tuple[Interval, Interval] | None:
    """The ranges of dims of ``before`` and of ``after`` that a reshape maps onto each other, for the group that contains
    ``dim``."""
    i = j = 0
    while i < len(before):
        start, to_start = i, j
        product, to_product = before[i], after[j] if j < len(after) else 1
        i, j = i + 1, j + 1
        while product != to_product:
            if product < to_product and i < len(before):
                product, i = product * before[i], i + 1
            elif j < len(after):
                to_product, j = to_product * after[j], j + 1
            else:
                return None
        if start <= dim < i:
            return (start, i), (to_start, min(j, len(after)))
    return None


def _carry(flat: list[tuple[int, ...]], lead: int, size: int, inner: int) -> tuple[tuple[int, ...], ...] | None:
    """The pieces of a dim of ``size`` elements that, repeated ``lead`` times and spread by ``inner``, give ``flat``."""
    if len(flat) % lead:
        return None
    pattern = flat[: len(flat) // lead]
    if pattern * lead != flat or sum(map(sum, pattern)) != size * inner:
        return None
    if any(n % inner for piece in pattern for n in piece):
        return None
    return tuple(tuple(n // inner for n in piece) for piece in pattern)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _cat(tensors: list[Any], dim: int) -> Any:
    import torch  # imported only if there are tensors: layouts alone need no torch

    return torch.cat(tensors, dim)


def in_one_dim(t: Tensor) -> Tensor:
    """The elements of a tensor in one dim with stride 1; a view if the tensor is contiguous.

    To torch a tensor of one element is contiguous whatever its strides, and ``reshape(-1)`` keeps them; but a tensor can be
    viewed as bytes only if its last stride is 1.
    """
    return t.contiguous().as_strided((t.numel(),), (1,))
