"""Which ranks hold the same of a tensor, from what all of them tell: what is written, and who writes it.

rank   copy   slot   bits
0      0      0      a            one whole tensor, of ranks 0 and 1; ranks 2 and 3 hold
1      0      1      b      ──►   the same bits: one view, which rank 0 writes
2      1      0      a
3      1      1      b

3      1      1      c      ──►   two views: copies that should be alike are not
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.errors import Finding, Findings
from meshwright.recording.taken import Copied
from meshwright.runtime.checksum import digest


@dataclass(frozen=True)
class Fact:
    """What one rank tells of what it holds of a tensor; ``bits`` is None where it has none, ``writer`` where any may write."""

    shape: tuple[int, ...]
    dtype: str
    slot: Hashable
    copy: Hashable
    bits: Hashable
    gathers: bool
    writer: int | None


@dataclass(frozen=True)
class View:
    """A whole tensor as some ranks have it.

    Attributes:
        key: its name in the file; None: these ranks have none.
        writer: the rank that hands it to rank 0.
        ranks: who have it.
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
        views: name → its views; more than one where ranks differ.
        uneven: name → ranks that have none, where others hold parts of the same whole: zeros stand in.
        strange: name → ranks that hold the same part with other bits (of a Job, whose parts are not told apart).
    """

    views: dict[str, tuple[View, ...]] = field(default_factory=dict)
    uneven: dict[str, tuple[int, ...]] = field(default_factory=dict)
    strange: dict[str, tuple[int, ...]] = field(default_factory=dict)


def facts_of(copies: Mapping[str, Copied]) -> dict[str, Fact]:
    """What this rank has to tell of what it copied. A share without elements that has no gradient lacks nothing."""
    return {name: _fact(copied) for name, copied in copies.items() if copied.layout.holds and not copied.hollow}


def _fact(copied: Copied) -> Fact:
    layout = copied.layout
    bits = None if copied.local is None else digest(copied.local)
    dtype = str(copied.dtype).removeprefix("torch.")
    return Fact(tuple(layout.shape), dtype, layout.slot, layout.copy, bits, layout.gathers, layout.writer)


def views_of(told: Sequence[Mapping[str, Fact]]) -> Views:
    """The views of every tensor, from the facts of all ranks.

    Raises PlanError: ranks have different tensors under the same name.
    """
    findings, made = Findings("this recording"), Views()
    by_name: dict[str, dict[int, Fact]] = {}
    for rank, facts in enumerate(told):
        for name, fact in facts.items():
            by_name.setdefault(name, {})[rank] = fact
    for name, of_rank in by_name.items():
        clash = _clash(name, of_rank)
        if clash is not None:
            findings.extend([clash])
        else:
            _add(name, of_rank, made)
    findings.raise_if_any()
    return made


def _clash(name: str, of_rank: Mapping[int, Fact]) -> Finding | None:
    """Whole tensors of one name that have different shapes. (Shapes of plain tensors may be those of shards.)"""
    shapes: dict[tuple[int, ...], int] = {}
    for rank, fact in of_rank.items():
        if fact.gathers:
            shapes.setdefault(fact.shape, rank)
    if len(shapes) < 2:
        return None
    given = ", ".join(f"{shape} on rank {rank}" for shape, rank in shapes.items())
    fix = "mw.record(..., names=lambda name: ...)  # the name on one device, where stages count their layers anew"
    return Finding(name, given, "one tensor of each name", fix)


def _add(name: str, of_rank: Mapping[int, Fact], made: Views) -> None:
    wholes: dict[Hashable, dict[Hashable, Fact]] = {}
    ranks: dict[Hashable, list[int]] = {}
    lacking, strange = [], []
    for rank, fact in sorted(of_rank.items()):
        parts = wholes.setdefault(fact.copy, {})
        first = parts.setdefault(fact.slot, fact)
        if first.bits is None and fact.bits is not None:
            parts[fact.slot] = fact
        elif None not in (first.bits, fact.bits) and first.bits != fact.bits:
            strange.append(rank)
        if fact.bits is None:
            lacking.append(rank)
        ranks.setdefault(fact.copy, []).append(rank)
    alike: dict[tuple[tuple[int, ...], Hashable], list[Hashable]] = {}
    for copy, parts in wholes.items():
        present = any(fact.bits is not None for fact in parts.values())
        shape = next(iter(parts.values())).shape
        bits = frozenset((slot, fact.bits) for slot, fact in parts.items()) if present else None
        alike.setdefault((shape, bits), []).append(copy)
    views = []
    for (_, some), copies in alike.items():
        fact = next(iter(wholes[copies[0]].values()))
        holders = tuple(sorted(rank for copy in copies for rank in ranks[copy]))
        key = None if some is None else name if len(alike) == 1 else f"{name}@{holders[0]}"
        writer = min(ranks[copies[0]]) if fact.writer is None else fact.writer
        views.append(View(key, writer, holders, fact.shape, fact.dtype))
        if some is not None and (short := [rank for rank in holders if rank in lacking]):
            made.uneven[name] = (*made.uneven.get(name, ()), *short)
    made.views[name] = tuple(views)
    if strange:
        made.strange[name] = tuple(strange)
