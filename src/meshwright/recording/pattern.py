"""``Pattern``: the relation between an actual tensor a and the expected tensor e. The first of these that fits is taken:

not_finite    a or e has nan or infinity, and they differ
same          a = e, except for rounding
zeros         a = 0
scaled        a = k·e                                  k by least squares
transposed    a = eᵀ
order         the blocks of a are those of e in another order
block_sums    each block of a is k times the sum of all blocks of e
blocks        each block of a is k_i times that of e; some k_i are 1, or 0
block_wrong   some blocks of a are right, others have no factor
rounding      none of these, and the difference is as large as rounding to bfloat16
other         none of these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose

import torch
from torch import Tensor

from meshwright.recording.tolerance import RELATIVE, Tolerance, in_float64, largest, norm

_LEAST = 4  # fewest elements of a block that may have a factor: fewer elements fit any factor by chance
_MOST_BLOCKS = 64  # most blocks of a dim that are tried: smaller blocks fit by chance, and trying all orders takes long
_PIECES = (1, 2, 3, 4)  # numbers of fused blocks in each rank's share with which other orders are tried (q, k, v, gate)
_FAR_BETTER = 3  # a factor must leave this many times less than 1 does, to be more than noise
_FAR_FROM_ONE = 10  # relative tolerances by which a factor must differ from 1


@dataclass(frozen=True)
class Pattern:
    """The relation between an actual and an expected tensor.

    Attributes:
        kind: one of the table above, or of the table in ``assembly``.
        error: the largest difference, relative to the largest expected element.
        factor: k of ``scaled`` and ``block_sums``; the best k of ``other``.
        residual: norm of a − k·e, relative to that of a.
        dim: the dim along which blocks lie.
        factors: of each block; None for a block that no factor fits.
        order: for each actual block, the number of the expected block that it equals.
        ranks: the ranks with this relation, if ranks differ.
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
    """The pattern of two tensors of one shape.

    Args:
        sizes: numbers of blocks into which ranks may have divided a dim: sizes of axes, and their products.
        noise: largest difference between two runs of one process in this tensor.
    """
    a, e = in_float64(actual), in_float64(expected)
    if not a.isfinite().all() or not e.isfinite().all():
        same = torch.equal(a.nan_to_num(), e.nan_to_num()) and torch.equal(a.isfinite(), e.isfinite())
        return Pattern("same" if same else "not_finite", float("inf"))
    allowed = tolerance.allowed(e, noise)
    off = largest(a - e)
    error = off / (largest(e) or 1.0)
    k, residual = _scalar(a, e)
    scaled = _is_scaled(a, e, k, residual, tolerance)
    clearly_scaled = scaled and a.numel() >= 2 * _LEAST and off > noise  # a factor is told even within the tolerance
    if off <= allowed and not clearly_scaled:
        return Pattern("same", error)
    if not largest(a):
        return Pattern("zeros", error, 0.0)
    if scaled:
        return Pattern("scaled", error, k, residual)
    pattern = (
        _transposed(a, e, allowed, error)
        or _reordered(a, e, allowed, sizes, error)
        or _added_up(a, e, tolerance, sizes, error)
        or _by_blocks(a, e, tolerance, allowed, sizes, error)
    )
    if pattern is not None:
        return pattern
    coarse = RELATIVE["bfloat16"]
    is_rounding = isclose(k, 1.0, abs_tol=coarse) and error <= 2 * coarse and residual < coarse
    return Pattern("rounding" if is_rounding else "other", error, k, residual)


def _scalar(a: Tensor, e: Tensor) -> tuple[float, float]:
    """(k, residual): the k with the least ‖a − k·e‖, and ‖a − k·e‖ / ‖a‖."""
    a = torch.view_as_real(a) if a.is_complex() else a
    e = torch.view_as_real(e) if e.is_complex() else e
    square = norm(e) ** 2
    k = float((a * e).sum()) / square if square else 0.0
    return k, norm(a - k * e) / (norm(a) or 1.0)


def _is_scaled(a: Tensor, e: Tensor, k: float, residual: float, tolerance: Tolerance) -> bool:
    """Whether a is k·e with a k other than 1: k leaves little, and far less than 1 does."""
    fits = residual <= tolerance.fit
    fits_better_than_one = norm(a - e) > _FAR_BETTER * residual * norm(a)
    return fits and fits_better_than_one and abs(k - 1) > _FAR_FROM_ONE * tolerance.relative


def _transposed(a: Tensor, e: Tensor, allowed: float, error: float) -> Pattern | None:
    is_square = a.dim() == 2 and a.shape[0] == a.shape[1]
    return Pattern("transposed", error) if is_square and largest(a - e.T) <= allowed else None


def _reordered(a: Tensor, e: Tensor, allowed: float, sizes: Sequence[int], error: float) -> Pattern | None:
    """The pattern ``order``, with the largest blocks that fit; None if no blocks fit."""
    for dim, size in enumerate(a.shape):
        for count in _counts(size, [n * pieces for pieces in _PIECES for n in sizes]):
            if size % count:
                continue
            order = _order(a.chunk(count, dim), e.chunk(count, dim), allowed)
            if order is not None:
                return Pattern("order", error, dim=dim, order=order)
    return None


def _order(actual: Sequence[Tensor], expected: Sequence[Tensor], allowed: float) -> tuple[int, ...] | None:
    """For each actual block, the number of the expected block that it equals; None if there is no permutation, or if the order
    is the same."""
    unused, order = list(range(len(expected))), []
    for block in actual:
        number = next((i for i in unused if largest(block - expected[i]) <= allowed), None)
        if number is None:
            return None
        unused.remove(number)
        order.append(number)
    return tuple(order) if order != sorted(order) else None


def _added_up(a: Tensor, e: Tensor, tolerance: Tolerance, sizes: Sequence[int], error: float) -> Pattern | None:
    """The pattern ``block_sums``: shards that were added up, or averaged, as if they were copies."""
    for dim, size in enumerate(a.shape):
        for count in _counts(size, sizes):
            if size % count or a.numel() < count * _LEAST:
                continue
            total = torch.stack(e.chunk(count, dim)).sum(0)
            k, residual = _scalar(a, torch.cat([total] * count, dim))
            if residual <= tolerance.fit and k > 0:
                return Pattern("block_sums", error, k, residual, dim=dim)
    return None


def what_remains(
    actual: Tensor, expected: Tensor, before: Tensor, tolerance: Tolerance, sizes: Sequence[int]
) -> Pattern | None:
    """The pattern ``carried``, or ``block_carried``: a − e is the gradient of the step before, in all or in some blocks.

    Args:
        before: the expected gradient of the step before.
    """
    a, e, b = in_float64(actual), in_float64(expected), in_float64(before)
    if not all(t.isfinite().all() for t in (a, e, b)) or largest(b - e) <= tolerance.allowed(e):
        return None  # twice the gradient, if both steps have the same one
    extra = a - e
    extra = torch.where(extra.abs() <= tolerance.allowed(e), torch.zeros_like(extra), extra)
    left = pattern_of(extra, b, tolerance, sizes)
    error = largest(extra) / (largest(e) or 1.0)
    if left.same:
        return Pattern("carried", error)
    if left.kind == "blocks" and all(k is not None and isclose(k, round(k), abs_tol=1e-3) for k in left.factors):
        return Pattern("block_carried", error, dim=left.dim, factors=left.factors)
    return None


def _by_blocks(
    a: Tensor, e: Tensor, tolerance: Tolerance, allowed: float, sizes: Sequence[int], error: float
) -> Pattern | None:
    """The pattern ``blocks``; else ``block_wrong`` with the division into blocks that has the smallest wrong share."""
    candidates: list[tuple[float, Pattern]] = []  # (share of blocks without a factor, pattern)
    for dim, size in enumerate(a.shape):
        for count in _counts(size, sizes):
            blocks = list(zip(a.chunk(count, dim), e.chunk(count, dim), strict=True))
            factors = tuple(_block_factor(x, y, tolerance, allowed) for x, y in blocks)
            if None not in factors:
                return Pattern("blocks", error, dim=dim, factors=factors)
            some_are_right = any(k == 1.0 and x.numel() >= _LEAST for k, (x, _) in zip(factors, blocks, strict=True))
            if some_are_right:
                pattern = Pattern("block_wrong", error, dim=dim, factors=factors)
                candidates.append((factors.count(None) / count, pattern))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _block_factor(a: Tensor, e: Tensor, tolerance: Tolerance, allowed: float) -> float | None:
    """1 for a block that is right, k for one that is k times the expected one; else None."""
    if largest(a - e) <= allowed:
        return 1.0
    if not largest(a):
        return 0.0
    k, residual = _scalar(a, e)
    return k if a.numel() >= _LEAST and _is_scaled(a, e, k, residual, tolerance) else None


def _counts(size: int, candidates: Sequence[int]) -> Iterator[int]:
    """The numbers of blocks to try for a dim of this size, in ascending order."""
    yield from sorted({count for count in candidates if 1 < count <= min(size, _MOST_BLOCKS)})
