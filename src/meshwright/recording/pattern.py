"""What a tensor that is wrong has to do with the one that it should be. Tried in this order, the first that fits is told:

same          a = e, but for rounding
not_finite    a has nan or infinity
zeros         a = 0
scaled        a = k·e                                  k by least squares
transposed    a = eᵀ
order         blocks of a are those of e in another order
blocks        each block of a is k_i times that of e; some k_i are 1, or 0
block_wrong   some blocks of a are those of e, others are something else
rounding      no pattern, and no larger than a coarser type's rounding
other         none of these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose

import torch
from torch import Tensor

from meshwright.recording.alike import RELATIVE, Tolerance, largest, norm, wide

_LEAST = 4  # elements of a block that has a factor: fewer fit anything
_MOST_BLOCKS = 64
_PIECES = (1, 2, 3, 4)  # fused blocks in each rank's share that an order is tried with


@dataclass(frozen=True)
class Pattern:
    """What two tensors have to do with each other.

    Attributes:
        kind: as the table above says; or of several values (``joined``): see there.
        error: the largest difference, relative to the largest element that is expected.
        factor: k, of ``scaled``; of ``other``, the best one.
        residual: what the best factor leaves, relative to the tensor.
        dim: along which blocks lie.
        factors: of each block; None where no factor fits.
        order: which expected block stands at each place.
        ranks: who is meant, where ranks differ.
    """

    kind: str
    error: float = 0.0
    factor: float | None = None
    residual: float = 0.0
    dim: int | None = None
    factors: tuple[float | None, ...] = ()
    order: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def same(self) -> bool:
        return self.kind == "same"


def pattern_of(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float = 0.0
) -> Pattern:
    """The pattern of two tensors of the same shape.

    Args:
        sizes: into how many blocks ranks may have cut a dim: sizes of axes, and their products.
        noise: by which two runs of one process differed in this tensor.
    """
    a, e = wide(actual), wide(expected)
    if not a.isfinite().all() or not e.isfinite().all():
        same = torch.equal(a.nan_to_num(), e.nan_to_num()) and torch.equal(a.isfinite(), e.isfinite())
        return Pattern("same" if same else "not_finite", float("inf"))
    allowed = tolerance.allowed(e, noise)
    off = largest(a - e)
    error = off / (largest(e) or 1.0)
    k, residual = _scalar(a, e)
    scaled = _is_scaled(a, e, k, residual, tolerance)
    if off <= allowed and not (scaled and a.numel() >= 2 * _LEAST and off > noise):
        return Pattern("same", error)
    if not largest(a):
        return Pattern("zeros", error, 0.0)
    if scaled:
        return Pattern("scaled", error, k, residual)
    by_place = _transposed(a, e, allowed, error) or _ordered(a, e, allowed, sizes, error)
    by_block = by_place or _by_blocks(a, e, tolerance, allowed, sizes, error)
    if by_block is not None:
        return by_block
    fine = isclose(k, 1.0, abs_tol=RELATIVE["bfloat16"]) and error <= 2 * RELATIVE["bfloat16"]
    return Pattern("rounding" if fine and residual < RELATIVE["bfloat16"] else "other", error, k, residual)


def _scalar(a: Tensor, e: Tensor) -> tuple[float, float]:
    """k by least squares, and ‖a − k·e‖ / ‖a‖."""
    a, e = torch.view_as_real(a) if a.is_complex() else a, torch.view_as_real(e) if e.is_complex() else e
    square = norm(e) ** 2
    k = float((a * e).sum()) / square if square else 0.0
    return k, norm(a - k * e) / (norm(a) or 1.0)


def _is_scaled(a: Tensor, e: Tensor, k: float, residual: float, tolerance: Tolerance) -> bool:
    """Whether a factor other than one explains nearly all: what it leaves is far less than what one leaves."""
    return residual <= tolerance.fit and norm(a - e) > 3 * residual * norm(a) and abs(k - 1) > 10 * tolerance.relative


def _transposed(a: Tensor, e: Tensor, allowed: float, error: float) -> Pattern | None:
    square = a.dim() == 2 and a.shape[0] == a.shape[1]
    return Pattern("transposed", error) if square and largest(a - e.T) <= allowed else None


def _ordered(a: Tensor, e: Tensor, allowed: float, sizes: Sequence[int], error: float) -> Pattern | None:
    """Equal blocks that changed places, the largest blocks that explain it."""
    for dim, size in enumerate(a.shape):
        for count in _counts(size, [n * pieces for pieces in _PIECES for n in sizes]):
            if size % count:
                continue
            order = _order(a.chunk(count, dim), e.chunk(count, dim), allowed)
            if order is not None:
                return Pattern("order", error, dim=dim, order=order)
    return None


def _order(actual: Sequence[Tensor], expected: Sequence[Tensor], allowed: float) -> tuple[int, ...] | None:
    """Which expected block each actual one is; None where it is none, or one that is taken."""
    left, order = list(range(len(expected))), []
    for block in actual:
        which = next((i for i in left if largest(block - expected[i]) <= allowed), None)
        if which is None:
            return None
        left.remove(which)
        order.append(which)
    return tuple(order) if order != sorted(order) else None


def _by_blocks(
    a: Tensor, e: Tensor, tolerance: Tolerance, allowed: float, sizes: Sequence[int], error: float
) -> Pattern | None:
    """Blocks with a factor each; where there is none, blocks of which some are right."""
    some: list[tuple[float, Pattern]] = []
    for dim, size in enumerate(a.shape):
        for count in _counts(size, sizes):
            blocks = list(zip(a.chunk(count, dim), e.chunk(count, dim), strict=True))
            factors = tuple(_block_factor(x, y, tolerance, allowed) for x, y in blocks)
            if None not in factors:
                return Pattern("blocks", error, dim=dim, factors=factors)
            if any(k == 1.0 and x.numel() >= _LEAST for k, (x, _) in zip(factors, blocks, strict=True)):
                some.append((factors.count(None) / count, Pattern("block_wrong", error, dim=dim, factors=factors)))
    return min(some, key=lambda found: found[0])[1] if some else None


def _block_factor(a: Tensor, e: Tensor, tolerance: Tolerance, allowed: float) -> float | None:
    """1 for a block that is right, k for one that is k times what it should be; else None."""
    if largest(a - e) <= allowed:
        return 1.0
    if not largest(a):
        return 0.0
    k, residual = _scalar(a, e)
    return k if a.numel() >= _LEAST and _is_scaled(a, e, k, residual, tolerance) else None


def _counts(size: int, wanted: Sequence[int]) -> Iterator[int]:
    yield from sorted({n for n in wanted if 1 < n <= min(size, _MOST_BLOCKS)})
