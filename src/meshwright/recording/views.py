"""``Views``: the distinct full tensors of a recording, from the facts of all ranks, and the rank that sends each.

rank   copy   slot   bits
0      0      0      a            ranks 0 and 1 hold one full tensor; ranks 2 and 3 hold a copy with
1      0      1      b      ──►   the same bits: one view, which rank 0 sends
2      1      0      a
3      1      1      b

3      1      1      c      ──►   two views: copies that should be equal are not
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.errors import Finding, Findings
from meshwright.recording.copies import TensorCopy
from meshwright.runtime.checksum import digest


@dataclass(frozen=True)
class Fact:
    """What one rank holds of a tensor.

    Attributes:
        shape: of the full tensor, as far as this rank knows.
        dtype: such as ``float32``.
        slot: which part of a full tensor this rank holds.
        copy: which copy of the full tensor this part belongs to.
        bits: a digest of the part; None if the rank has no such tensor.
        gathers: whether gathering the full tensor is collective.
        writer: the one rank that gets the full tensor; None if every rank of the copy does.
    """

    shape: tuple[int, ...]
    dtype: str
    slot: Hashable
    copy: Hashable
    bits: Hashable
    gathers: bool
    writer: int | None


@dataclass(frozen=True)
class View:
    """A full tensor with the value that some ranks have.

    Attributes:
        key: its name in the file; None if these ranks have no such tensor.
        writer: the rank that sends it to rank 0.
        ranks: those with this value.
        shape: of the full tensor.
        dtype: such as ``float32``.
    """

    key: str | None
    writer: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Views:
    """All tensors of one kind.

    Attributes:
        views: name → its views; more than one if ranks differ.
        uneven: name → ranks without the tensor, if other ranks hold parts of the same copy. Zeros replace their parts.
        strange: name → ranks that hold the same part of the same copy with other bits (in a Job, all ranks are one copy).
    """

    views: dict[str, tuple[View, ...]] = field(default_factory=dict)
    uneven: dict[str, tuple[int, ...]] = field(default_factory=dict)
    strange: dict[str, tuple[int, ...]] = field(default_factory=dict)


def facts_of(copies: Mapping[str, TensorCopy]) -> dict[str, Fact]:
    """The facts of this rank's tensors. An absent gradient of a shard without elements is left out: nothing is missing."""
    return {name: _fact(copied) for name, copied in copies.items() if copied.layout.holds and not copied.hollow}


def _fact(copied: TensorCopy) -> Fact:
    layout = copied.layout
    bits = None if copied.local is None else digest(copied.local)
    dtype = str(copied.dtype).removeprefix("torch.")
    return Fact(tuple(layout.shape), dtype, layout.slot, layout.copy, bits, layout.gathers, layout.writer)


def views_of(facts_by_rank: Sequence[Mapping[str, Fact]]) -> Views:
    """The views of every tensor, from the facts of all ranks.

    Raises:
        PlanError: ranks have different tensors under the same name.
    """
    findings, views = Findings("this recording"), Views()
    by_name: dict[str, dict[int, Fact]] = {}  # name → rank → fact
    for rank, facts in enumerate(facts_by_rank):
        for name, fact in facts.items():
            by_name.setdefault(name, {})[rank] = fact
    for name, by_rank in by_name.items():
        clash = _clash(name, by_rank)
        if clash is not None:
            findings.extend([clash])
        else:
            _add(name, by_rank, views)
    findings.raise_if_any()
    return views


def _clash(name: str, by_rank: Mapping[int, Fact]) -> Finding | None:
    """A finding if full tensors of one name have different shapes. (Plain tensors may be shards, so they are not compared.)"""
    shapes: dict[tuple[int, ...], int] = {}
    for rank, fact in by_rank.items():
        if fact.gathers:
            shapes.setdefault(fact.shape, rank)
    if len(shapes) < 2:
        return None
    given = ", ".join(f"{shape} on rank {rank}" for shape, rank in shapes.items())
    fix = "mw.record(..., names=lambda name: ...)  # the name on one device, if stages number their layers from 0"
    return Finding(name, given, "one tensor of each name", fix)


def _add(name: str, by_rank: Mapping[int, Fact], views: Views) -> None:
    """Adds the views of one tensor: one for each distinct value of its copies."""
    copies: dict[Hashable, dict[Hashable, Fact]] = {}  # copy → slot → fact
    ranks: dict[Hashable, list[int]] = {}  # copy → ranks
    lacking, strange = [], []
    for rank, fact in sorted(by_rank.items()):
        parts = copies.setdefault(fact.copy, {})
        first = parts.setdefault(fact.slot, fact)
        if first.bits is None and fact.bits is not None:
            parts[fact.slot] = fact
        elif None not in (first.bits, fact.bits) and first.bits != fact.bits:
            strange.append(rank)
        if fact.bits is None:
            lacking.append(rank)
        ranks.setdefault(fact.copy, []).append(rank)
    by_value: dict[tuple[tuple[int, ...], Hashable], list[Hashable]] = {}  # (shape, bits of all parts) → equal copies
    for copy, parts in copies.items():
        present = any(fact.bits is not None for fact in parts.values())
        shape = next(iter(parts.values())).shape
        bits = frozenset((slot, fact.bits) for slot, fact in parts.items()) if present else None
        by_value.setdefault((shape, bits), []).append(copy)
    of_name = []
    for (_, bits_of_parts), equal_copies in by_value.items():
        fact = next(iter(copies[equal_copies[0]].values()))
        holders = tuple(sorted(rank for copy in equal_copies for rank in ranks[copy]))
        key = None
        if bits_of_parts is not None:
            key = name if len(by_value) == 1 else f"{name}@{holders[0]}"
            if without := [rank for rank in holders if rank in lacking]:
                views.uneven[name] = (*views.uneven.get(name, ()), *without)
        writer = min(ranks[equal_copies[0]]) if fact.writer is None else fact.writer
        of_name.append(View(key, writer, holders, fact.shape, fact.dtype))
    views.views[name] = tuple(of_name)
    if strange:
        views.strange[name] = tuple(strange)
