"""What the values of several ranks have to do with the one whole tensor that they should make.

of its shape, and equal         replicas
of its shape, and different     some_ranks      some are right, others are not
                                summands        their sum is right: nobody summed them
                                unaveraged      their mean is right: nobody averaged them
                                replicas        none of these
of other shapes                 shards of somebody's own: put together along the dim that fits; or, of one
                                shape alone, one_share: a rank's share is all that there is
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.recording.alike import Tolerance, largest, wide
from meshwright.recording.folder import Seen
from meshwright.recording.pattern import Pattern, pattern_of


@dataclass(frozen=True)
class Joined:
    """A judged tensor. ``value``: what all ranks hold together, if that is one; ``note``: how it was put together."""

    pattern: Pattern
    value: Tensor | None = None
    note: str = ""


def joined(
    seen: Sequence[Seen], expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float = 0.0
) -> Joined:
    """What ranks hold against what they should.

    Args:
        seen: each distinct value with its ranks; at least one has a value.
        sizes, noise: as for ``pattern_of``.
    """
    have = [s for s in seen if s.value is not None]
    lack = tuple(rank for s in seen if s.value is None for rank in s.ranks)
    if all(s.value is not None and s.value.shape == expected.shape for s in have):
        made = _replicas(have, expected, tolerance, sizes, noise)
    else:
        made = _shards(have, expected, tolerance, sizes, noise)
    return replace(made, pattern=Pattern("none_on_ranks", ranks=lack)) if lack and made.pattern.same else made


def _replicas(
    have: Sequence[Seen], expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float
) -> Joined:
    values = [s.value for s in have if s.value is not None]
    if len(values) == 1:
        return Joined(pattern_of(values[0], expected, tolerance, sizes, noise), values[0])
    patterns = [pattern_of(value, expected, tolerance, sizes, noise) for value in values]
    worst = max(patterns, key=lambda pattern: pattern.error)
    wrong = tuple(rank for s, p in zip(have, patterns, strict=True) if not p.same for rank in s.ranks)
    if not wrong:
        return Joined(worst, values[0], "ranks differ in the last bits")
    if any(pattern.same for pattern in patterns):
        return Joined(replace(worst, kind="some_ranks", ranks=wrong))
    total = torch.stack([wide(value) for value in values]).sum(0)
    counts = [len(s.ranks) for s in have]
    mean = sum((wide(v) * n for v, n in zip(values, counts, strict=True)), torch.zeros(())) / sum(counts)
    kinds = (("summands", total), ("unaveraged", mean))
    for kind, value in kinds:
        if pattern_of(value, expected, tolerance, sizes, noise).same:
            return Joined(replace(worst, kind=kind, ranks=wrong))
    alike = pattern_of(total, expected, tolerance, sizes, noise)
    if alike.kind == "scaled":
        return Joined(replace(alike, kind="summands", error=worst.error, ranks=wrong))
    return Joined(replace(worst, kind="replicas", ranks=wrong))


def _shards(have: Sequence[Seen], expected: Tensor, tolerance: Tolerance, sizes: Sequence[int], noise: float) -> Joined:
    best: Joined | None = None
    counts = sorted({*sizes, len(have)})
    for value, how in _wholes(have, expected):
        pattern = pattern_of(value, expected, tolerance, counts, noise)
        if pattern.same:
            return Joined(pattern, value, how)
        if best is None or _rank(pattern) < _rank(best.pattern):
            best = Joined(pattern, value, how)
    return best or Joined(_no_whole(have, expected, tolerance, noise))


def _wholes(have: Sequence[Seen], expected: Tensor) -> Iterator[tuple[Tensor, str]]:
    """The values as one tensor of the expected shape, in each way that fits: each distinct one once, or one of every rank."""
    distinct = [s.value for s in have if s.value is not None]
    by_rank = {rank: s.value for s in have for rank in s.ranks if s.value is not None}
    for values in (distinct, [by_rank[rank] for rank in sorted(by_rank)]):
        for dim in range(expected.dim()):
            if _fits(values, expected, dim):
                yield torch.cat(values, dim), f"plain shards, put together along dim {dim} in the order of ranks"
        if (
            sum(v.numel() for v in values) == expected.numel()
            and all(v.dim() == 1 for v in values)
            and expected.dim() != 1
        ):
            yield torch.cat(values).view(expected.shape), "flat shards, put together in the order of ranks"


def _fits(values: Sequence[Tensor], expected: Tensor, dim: int) -> bool:
    shapes = [list(value.shape) for value in values]
    if any(len(shape) != expected.dim() for shape in shapes):
        return False
    around = {tuple(n for d, n in enumerate(shape) if d != dim) for shape in shapes}
    wanted = tuple(n for d, n in enumerate(expected.shape) if d != dim)
    return around == {wanted} and sum(shape[dim] for shape in shapes) == expected.shape[dim]


def _no_whole(have: Sequence[Seen], expected: Tensor, tolerance: Tolerance, noise: float) -> Pattern:
    """Values that make no whole: a transpose, one share of it, or another shape."""
    value, ranks = have[0].value, have[0].ranks
    assert value is not None
    turned = value.dim() == 2 and value.T.shape == expected.shape
    if turned and pattern_of(value.T, expected, tolerance, (), noise).same:
        return Pattern("transposed", float("inf"))
    allowed = tolerance.allowed(expected, noise)
    for dim, share in _shares(value, expected):
        for at, block in enumerate(expected.chunk(share, dim)):
            if largest(wide(value) - wide(block)) <= allowed:
                return Pattern("one_share", float("inf"), dim=dim, order=(at, share), ranks=ranks)
    return Pattern("shape", float("inf"), ranks=ranks)


def _shares(value: Tensor, expected: Tensor) -> Iterator[tuple[int, int]]:
    """The dims along which a value may be one of equal blocks of the whole, each with how many there are."""
    for dim in range(expected.dim() if value.dim() == expected.dim() else 0):
        whole, part = expected.shape[dim], value.shape[dim]
        around = [n for d, n in enumerate(value.shape) if d != dim] == [
            n for d, n in enumerate(expected.shape) if d != dim
        ]
        if around and 0 < part < whole and whole % part == 0:
            yield dim, whole // part


_ORDER = ("same", "scaled", "order", "blocks", "rounding", "block_wrong", "zeros", "other", "not_finite")


def _rank(pattern: Pattern) -> tuple[int, float]:
    return (_ORDER.index(pattern.kind) if pattern.kind in _ORDER else len(_ORDER), pattern.error)
