"""Which cause a pattern has: the few rules that choose one of the table in ``causes``.

pattern of a gradient     what else is known                       cause
k = n, all gradients      n ranks of an axis                       summed_over_data
k = 1/n, all gradients                                             averaged_twice
k = n, some gradients                                              counted_over_tensor
k = 1/n, some gradients                                            divided_over_tensor
k = m or 1/m              m times as many losses a step            accumulated, accumulation_divided
k, all gradients                                                   scaled_alike
none                      ranks have unequal numbers of rows       mean_of_means
any other                                                          of the pattern's name
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose

from meshwright.recording.causes import CAUSES
from meshwright.recording.pairs import is_data, is_tensor
from meshwright.recording.pattern import Pattern
from meshwright.recording.verdict import Kind, Wrong


@dataclass(frozen=True)
class Facts:
    """What is known besides the patterns.

    Attributes:
        spans: axes, each two together, and all ranks: how many ranks they have.
        forwards: forwards a step of many ranks, by those of one process.
        counts: rows of each rank, where ranks have unequal numbers.
        other_rows: whether the rows were others.
    """

    spans: Mapping[str, int]
    forwards: float = 1.0
    counts: tuple[int, ...] = ()
    other_rows: bool = False


@dataclass
class Group:
    """Things that differ in the same way: the key of their cause, and what its sentence says of them."""

    key: str
    wrong: list[Wrong]
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def says(self) -> str:
        return CAUSES[self.key].says.format(**self.fields)


def grouped(kind: Kind, wrong: Sequence[Wrong], total: int, facts: Facts) -> list[Group]:
    """What differs, by cause; the largest group first. ``total``: how many of this kind were judged."""
    alike: dict[tuple[object, ...], list[Wrong]] = {}
    for one in wrong:
        alike.setdefault(_signature(one.pattern, facts), []).append(one)
    merged: dict[tuple[str, str], Group] = {}
    for some in alike.values():
        key, fields = _cause(kind, some, total, facts)
        group = Group(key, some, fields)
        known = merged.setdefault((key, group.says), group)
        if known is not group:
            known.wrong += some
    return sorted(merged.values(), key=lambda group: -len(group.wrong))


def _signature(pattern: Pattern, facts: Facts) -> tuple[object, ...]:
    """What patterns share that have one cause; a factor near the size of an axis is taken for that size."""
    spans = tuple(axis for axis, _ in _spans_of(pattern.factor, facts))
    known = pattern.factor is not None and pattern.kind != "other"
    factor = None if not known else (*spans, (pattern.factor or 0.0) < 1) if spans else f"{pattern.factor:.2g}"
    factors = tuple(None if f is None else f"{f:.2g}" for f in pattern.factors)
    return pattern.kind, factor, factors, pattern.order, pattern.dim, pattern.ranks


def _cause(kind: Kind, some: list[Wrong], total: int, facts: Facts) -> tuple[str, dict[str, object]]:
    pattern = max((wrong.pattern for wrong in some), key=lambda p: -p.residual)
    fields: dict[str, object] = {
        "factor": _text(pattern.factor), "ranks": _ranks(pattern.ranks), "dim": pattern.dim, "axis": "", "size": "",
        "blocks": " : ".join(map(_text, pattern.factors)), "order": " ".join(map(str, pattern.order)),
        "share": f"{pattern.order[0] + 1} of {pattern.order[1]} along dim {pattern.dim}" if pattern.kind == "one_share" else "",
        "counts": ", ".join(map(str, facts.counts)),
    }  # fmt: skip
    if kind == "gradients":
        return _of_gradients(pattern, len(some) == total, facts, fields)
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
    "unaveraged": "weights_replicas", "summands": "weights_replicas",
}  # fmt: skip


def _of_gradients(
    pattern: Pattern, every: bool, facts: Facts, fields: dict[str, object]
) -> tuple[str, dict[str, object]]:
    if pattern.kind == "scaled":
        return _scaled(pattern.factor or 0.0, every, facts, fields)
    if pattern.kind == "blocks":
        return _by_factors(pattern, "block_zeros", "block_scaled"), fields
    if pattern.kind in ("other", "replicas") and facts.other_rows:
        return "other_rows", fields
    if pattern.kind in ("other", "rounding", "block_wrong") and facts.counts:
        return "mean_of_means", fields
    return pattern.kind, fields


def _by_factors(pattern: Pattern, with_zeros: str, without: str) -> str:
    return with_zeros if 0.0 in pattern.factors else without


def _scaled(factor: float, every: bool, facts: Facts, fields: dict[str, object]) -> tuple[str, dict[str, object]]:
    """The meaning of a factor: of all gradients a matter of means over rows, of some a matter of what ranks share."""
    if isclose(factor, -1.0, rel_tol=_NEAR):
        return "negated", fields
    if facts.forwards > 1 and (matched := _times(factor, facts.forwards)):
        return ("accumulated" if matched > 0 else "accumulation_divided"), fields | {"size": f"{facts.forwards:g}"}
    matches = dict(_spans_of(factor, facts))
    if not matches:
        return ("scaled_alike" if every else "scaled"), fields
    kinds = {is_data(axis) for axis in matches if is_data(axis) or is_tensor(axis)}
    data = every if len(kinds) != 1 else kinds.pop()  # where names of axes leave it open
    keys = ("summed_over_data", "averaged_twice") if data else ("counted_over_tensor", "divided_over_tensor")
    named = " or ".join(f"{axis}={size}" for axis, size in matches.items())
    return keys[factor < 1], fields | {"axis": named, "size": next(iter(matches.values()))}


_NEAR = 0.03


def _spans_of(factor: float | None, facts: Facts) -> Iterator[tuple[str, int]]:
    """The axes whose size a factor is, or one part in it; axes alone come first."""
    if factor is not None:
        yield from ((axis, size) for axis, size in facts.spans.items() if _times(factor, size))


def _times(factor: float, size: float) -> int:
    """1 if a factor is a size, −1 if it is one part in it, else 0."""
    if size > 1 and isclose(factor, size, rel_tol=_NEAR):
        return 1
    return -1 if size > 1 and isclose(factor, 1 / size, rel_tol=_NEAR) else 0


def _text(factor: float | None) -> str:
    return "?" if factor is None else f"{factor:.4g}"


def _ranks(ranks: Sequence[int]) -> str:
    most = 8
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:most]))}{more}"
