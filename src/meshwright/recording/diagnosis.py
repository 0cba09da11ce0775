"""Chooses the cause of a pattern: a few rules that lead to a line of the table in ``causes``.

pattern of a gradient     what else is known                       cause
k = n, all gradients      n ranks of an axis                       summed_over_data
k = 1/n, all gradients                                             averaged_twice
k = n, some gradients                                              counted_over_tensor
k = 1/n, some gradients                                            divided_over_tensor
k = m or 1/m              m times as many losses a step            accumulated, accumulation_divided
k, all gradients                                                   scaled_alike
none                      the weights differ before the step       other_weights
                          the rows differ                          other_rows
                          ranks have unequal numbers of rows       mean_of_means
any other                                                          of the pattern's name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose

from meshwright.recording.causes import CAUSES
from meshwright.recording.pairs import is_data, is_tensor
from meshwright.recording.pattern import Pattern
from meshwright.recording.verdict import Kind, TensorDifference


@dataclass(frozen=True)
class Facts:
    """Facts of a step that the rules need besides the patterns.

    Attributes:
        spans: text → number of ranks, of each axis, each two axes together, and all ranks.
        forwards: ratio of the numbers of forwards in a step, many processes to one.
        counts: number of rows of each rank, if they are unequal; else empty.
        other_rows: whether the two runs used different rows.
        other_weights: whether they started from different weights, not counting a cast.
    """

    spans: Mapping[str, int]
    forwards: float = 1.0
    counts: tuple[int, ...] = ()
    other_rows: bool = False
    other_weights: bool = False


@dataclass
class Group:
    """Differences with one cause.

    Attributes:
        key: of the cause.
        wrong: the differences.
        fields: values for the placeholders in the cause's sentence.
    """

    key: str
    wrong: list[TensorDifference]
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def says(self) -> str:
        return CAUSES[self.key].says.format(**self.fields)


def grouped(kind: Kind, wrong: Sequence[TensorDifference], total: int, facts: Facts) -> list[Group]:
    """Groups differences of one kind by their cause. The largest group comes first.

    Args:
        total: number of compared values of this kind.
    """
    by_signature: dict[tuple[object, ...], list[TensorDifference]] = {}
    for one in wrong:
        by_signature.setdefault(_signature(one.pattern, facts), []).append(one)
    groups: dict[tuple[str, str], Group] = {}  # (key, sentence) → group
    for some in by_signature.values():
        key, fields = _cause(kind, some, total, facts)
        group = Group(key, some, fields)
        first = groups.setdefault((key, group.says), group)
        if first is not group:
            first.wrong += some
    return sorted(groups.values(), key=lambda group: -len(group.wrong))


def _signature(pattern: Pattern, facts: Facts) -> tuple[object, ...]:
    """A key that patterns with one cause share. Factors near the size of one axis count as equal; others are rounded."""
    spans = tuple(axis for axis, _ in _spans_of(pattern.factor, facts))
    factor: object = None
    if pattern.factor is not None and pattern.kind != "other":
        factor = (*spans, pattern.factor < 1) if spans else f"{pattern.factor:.2g}"
    factors = tuple(None if f is None else f"{f:.2g}" for f in pattern.factors)
    return pattern.kind, factor, factors, pattern.order, pattern.dim, pattern.ranks


def _cause(kind: Kind, some: list[TensorDifference], total: int, facts: Facts) -> tuple[str, dict[str, object]]:
    """(key of the cause, values for its sentence) of differences with one signature."""
    pattern = max((wrong.pattern for wrong in some), key=lambda p: -p.residual)  # the one with the best fit
    fields: dict[str, object] = {
        "factor": _text(pattern.factor), "ranks": _ranks_text(pattern.ranks), "dim": pattern.dim, "axis": "", "size": "",
        "blocks": " : ".join(map(_text, pattern.factors)), "order": " ".join(map(str, pattern.order)),
        "share": f"{pattern.order[0] + 1} of {pattern.order[1]} along dim {pattern.dim}" if pattern.kind == "one_share" else "",
        "counts": ", ".join(map(str, facts.counts)),
    }  # fmt: skip
    if kind == "gradients":
        return _gradient_cause(pattern, len(some) == total, facts, fields)
    if kind == "loss":
        match = next(_spans_of(pattern.factor, facts), None)
        return ("loss_scaled", fields | {"axis": "{}={}".format(*match)}) if match else ("loss_differs", fields)
    if kind == "updates":
        return _UPDATES.get(pattern.kind, _by_factors(pattern, "stale_shard", "update_other")), fields
    if kind == "weights":
        return _WEIGHTS.get(pattern.kind, "weights_differ"), fields
    return "settings" if kind == "settings" else f"{kind}_{pattern.kind}", fields


_UPDATES = {
    "zeros": "not_updated", "scaled": "update_scaled", "order": "update_order", "not_stepped": "not_stepped",
    "some_ranks": "update_replicas", "replicas": "update_replicas", "summands": "update_replicas",
    "unaveraged": "update_replicas", "none_zeros": "none_zeros",
}  # fmt: skip
_WEIGHTS = {
    "rounding": "weights_cast", "order": "weights_order", "some_ranks": "weights_replicas", "replicas": "weights_replicas",
    "unaveraged": "weights_replicas", "summands": "weights_replicas", "blocks": "weights_blocks",
    "block_wrong": "weights_blocks",
}  # fmt: skip


def _gradient_cause(
    pattern: Pattern, is_all: bool, facts: Facts, fields: dict[str, object]
) -> tuple[str, dict[str, object]]:
    """(key, values) for gradients. ``is_all``: whether all gradients have this pattern."""
    if pattern.kind == "scaled":
        return _factor_cause(pattern.factor or 0.0, is_all, facts, fields)
    if pattern.kind == "blocks":
        return _by_factors(pattern, "block_zeros", "block_scaled"), fields
    if pattern.kind in ("other", "rounding", "block_wrong", "replicas") and facts.other_weights:
        return "other_weights", fields
    if pattern.kind in ("other", "replicas") and facts.other_rows:
        return "other_rows", fields
    if pattern.kind in ("other", "rounding", "block_wrong") and facts.counts:
        return "mean_of_means", fields
    return pattern.kind, fields


def _by_factors(pattern: Pattern, with_zeros: str, without: str) -> str:
    """``with_zeros`` if a block has the factor 0, else ``without``."""
    return with_zeros if 0.0 in pattern.factors else without


def _factor_cause(
    factor: float, is_all: bool, facts: Facts, fields: dict[str, object]
) -> tuple[str, dict[str, object]]:
    """(key, values) for a factor. A factor of all gradients concerns the mean over rows; one of some, what ranks share."""
    if isclose(factor, -1.0, rel_tol=_NEAR):
        return "negated", fields
    if facts.forwards > 1 and (power := _power_of(factor, facts.forwards)):
        return ("accumulated" if power > 0 else "accumulation_divided"), fields | {"size": f"{facts.forwards:g}"}
    matches = dict(_spans_of(factor, facts))
    if not matches:
        return ("scaled_alike" if is_all else "scaled"), fields
    kinds = {is_data(axis) for axis in matches if is_data(axis) or is_tensor(axis)}
    over_data = kinds.pop() if len(kinds) == 1 else is_all  # if names of axes do not decide
    keys = ("summed_over_data", "averaged_twice") if over_data else ("counted_over_tensor", "divided_over_tensor")
    axes = " or ".join(f"{axis}={size}" for axis, size in matches.items())
    return keys[factor < 1], fields | {"axis": axes, "size": next(iter(matches.values()))}


_NEAR = 0.03  # relative: rounding in half types, and clipping, change a factor by a few percent; sizes differ by more


def _spans_of(factor: float | None, facts: Facts) -> Iterator[tuple[str, int]]:
    """(text, size) of the spans of which a factor is the size or the inverse; single axes come first."""
    if factor is not None:
        yield from ((axis, size) for axis, size in facts.spans.items() if _power_of(factor, size))


def _power_of(factor: float, size: float) -> int:
    """1 if a factor is the size, −1 if it is its inverse, else 0."""
    if size > 1 and isclose(factor, size, rel_tol=_NEAR):
        return 1
    return -1 if size > 1 and isclose(factor, 1 / size, rel_tol=_NEAR) else 0


def _text(factor: float | None) -> str:
    return "?" if factor is None else f"{factor:.4g}"


_SHOWN = 8  # most ranks that a sentence names


def _ranks_text(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
