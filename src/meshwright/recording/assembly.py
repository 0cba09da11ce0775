"""The relation between the values of several ranks and the full tensor that they should make.

equal values of its shape       replicas: compared by ``pattern_of``
different values of its shape   some_ranks      some are right, others are wrong
                                summands        their sum is right: they were not summed
                                unaveraged      their mean is right: they were not averaged
                                replicas        none of these
values of other shapes          shards that a script cut itself: concatenated along the dim that fits; or one_share, if
                                there is only the share of one rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.recording.folder import RankValue
from meshwright.recording.pattern import Pattern, pattern_of
from meshwright.recording.tolerance import Tolerance, in_float64, largest


@dataclass(frozen=True)
class AssembledTensor:
    """A tensor that several ranks hold, put together and compared with the expected tensor.

    Attributes:
        pattern: the relation to the expected tensor.
        value: the full tensor that all ranks hold together, if they do.
        note: how the tensor was put together from shards, for a person.
    """

    pattern: Pattern
    value: Tensor | None = None
    note: str = ""


def assemble(
    seen: Sequence[RankValue], expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float = 0.0
) -> AssembledTensor:
    """Compares the values of all ranks with the expected full tensor.

    Args:
        seen: each distinct value with its ranks. At least one rank has a value.
        sizes, noise: as for ``pattern_of``.
    """
    present = [s for s in seen if s.value is not None]
    lacking = tuple(rank for s in seen if s.value is None for rank in s.ranks)
    if all(s.value is not None and s.value.shape == expected.shape for s in present):
        result = _replicas(present, expected, tolerance, sizes, noise)
    else:
        result = _shards(present, expected, tolerance, sizes, noise)
    if lacking and result.pattern.same:
        return replace(result, pattern=Pattern("none_on_ranks", ranks=lacking))
    return result


def _replicas(
    present: Sequence[RankValue], expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float
) -> AssembledTensor:
    """Compares values of the expected shape: each by itself, then their sum and their mean."""
    values = [s.value for s in present if s.value is not None]
    if len(values) == 1:
        return AssembledTensor(pattern_of(values[0], expected, tolerance, sizes, noise), values[0])
    patterns = [pattern_of(value, expected, tolerance, sizes, noise) for value in values]
    worst = max(patterns, key=lambda pattern: pattern.error)
    wrong = tuple(rank for s, p in zip(present, patterns, strict=True) if not p.same for rank in s.ranks)
    if not wrong:
        return AssembledTensor(worst, values[0], "ranks differ in the last bits")
    if any(pattern.same for pattern in patterns):
        return AssembledTensor(replace(worst, kind="some_ranks", ranks=wrong))
    total = torch.stack([in_float64(value) for value in values]).sum(0)
    pattern_of_total = pattern_of(total, expected, tolerance, sizes, noise)
    if pattern_of_total.same:
        return AssembledTensor(replace(worst, kind="summands", ranks=wrong))
    counts = [len(s.ranks) for s in present]
    mean = sum((in_float64(v) * n for v, n in zip(values, counts, strict=True)), torch.zeros(())) / sum(counts)
    if pattern_of(mean, expected, tolerance, sizes, noise).same:
        return AssembledTensor(replace(worst, kind="unaveraged", ranks=wrong))
    if pattern_of_total.kind == "scaled":
        return AssembledTensor(replace(pattern_of_total, kind="summands", error=worst.error, ranks=wrong))
    return AssembledTensor(replace(worst, kind="replicas", ranks=wrong))


def _shards(
    present: Sequence[RankValue], expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float
) -> AssembledTensor:
    """Puts values of other shapes together in each way that fits, and takes the way with the best pattern."""
    best: AssembledTensor | None = None
    counts = sorted({*sizes, len(present)})
    for value, note in _assembled(present, expected):
        pattern = pattern_of(value, expected, tolerance, counts, noise)
        if pattern.same:
            return AssembledTensor(pattern, value, note)
        if best is None or _badness(pattern) < _badness(best.pattern):
            best = AssembledTensor(pattern, value, note)
    return best or AssembledTensor(_not_assembled(present, expected, tolerance, noise))


def _assembled(present: Sequence[RankValue], expected: Tensor) -> Iterator[tuple[Tensor, str]]:
    """(the values as one tensor of the expected shape, note), for each way that fits.

    Tried with each distinct value once, and with one value of every rank.
    """
    distinct = [s.value for s in present if s.value is not None]
    by_rank = {rank: s.value for s in present for rank in s.ranks if s.value is not None}
    for values in (distinct, [by_rank[rank] for rank in sorted(by_rank)]):
        for dim in range(expected.dim()):
            if _fits(values, expected, dim):
                yield torch.cat(values, dim), f"plain shards, put together along dim {dim} in the order of ranks"
        is_flat = all(value.dim() == 1 for value in values) and expected.dim() != 1
        if is_flat and sum(value.numel() for value in values) == expected.numel():
            yield torch.cat(values).view(expected.shape), "flat shards, put together in the order of ranks"


def _fits(values: Sequence[Tensor], expected: Tensor, dim: int) -> bool:
    """Whether the values, concatenated along ``dim``, have the expected shape."""
    if any(value.dim() != expected.dim() for value in values):
        return False
    other_dims = {_without(value.shape, dim) for value in values}
    total = sum(value.shape[dim] for value in values)
    return other_dims == {_without(expected.shape, dim)} and total == expected.shape[dim]


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """The sizes of all other dims."""
    return tuple(size for d, size in enumerate(shape) if d != dim)


def _not_assembled(present: Sequence[RankValue], expected: Tensor, tolerance: Tolerance, noise: float) -> Pattern:
    """The pattern of values that do not make the expected shape: a transpose, one share of it, or another shape."""
    value, ranks = present[0].value, present[0].ranks
    assert value is not None
    may_be_transposed = value.dim() == 2 and value.T.shape == expected.shape
    if may_be_transposed and pattern_of(value.T, expected, tolerance, (), noise).same:
        return Pattern("transposed", float("inf"))
    allowed = tolerance.allowed(expected, noise)
    for dim, count in _equal_blocks(value, expected):
        for i, block in enumerate(expected.chunk(count, dim)):
            if largest(in_float64(value) - in_float64(block)) <= allowed:
                return Pattern("one_share", float("inf"), dim=dim, order=(i, count), ranks=ranks)
    return Pattern("shape", float("inf"), ranks=ranks)


def _equal_blocks(value: Tensor, expected: Tensor) -> Iterator[tuple[int, int]]:
    """(dim, number of blocks), for each dim along which a value may be one of equal blocks of the expected tensor."""
    for dim in range(expected.dim() if value.dim() == expected.dim() else 0):
        total, part = expected.shape[dim], value.shape[dim]
        if _without(value.shape, dim) == _without(expected.shape, dim) and 0 < part < total and total % part == 0:
            yield dim, total // part


_ORDER = ("same", "scaled", "order", "block_sums", "blocks", "rounding", "block_wrong", "zeros", "other", "not_finite")


def _badness(pattern: Pattern) -> tuple[int, float]:
    """Orders patterns: those that explain more come first."""
    return (_ORDER.index(pattern.kind) if pattern.kind in _ORDER else len(_ORDER), pattern.error)
