"""What a whole model takes, from rehearsals of it with few blocks: linear in the number of blocks, moment by moment.

    base        embed  b0 b1    b79 head │ head b79    b1 b0 embed
    one more    embed  b0 b1 b2 b79 head │ head b79 b2 b1 b0 embed
                └ the same from the start ┘            └ the same from the end

A moment of the base has one that it is like in the rehearsal with one more block: as far from the start of its action, or as
far from its end. What lives at it in the whole model is ``base + n · (one more − base)``, n blocks being left out. Moments of
blocks in between lie between those of the first and of the last, so that the largest is among these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from meshwright.hardware.profile import NOTHING, Estimate
from meshwright.prediction.clock import Phase, Spent
from meshwright.prediction.exchanges import extrapolated, module_pattern
from meshwright.prediction.memory import KERNELS, Levels, Moment, PhaseMoments, Site
from meshwright.prediction.passing import NotAlike
from meshwright.schedule import Action

Part = tuple[int, int, Moment]
"""(which rehearsal, how often it counts, its moment)"""
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Level:
    """A moment of the whole model: bytes that live, and of which moments they are the sum."""

    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class PhaseLevels:
    """The memory of an action or phase of the whole model; ``PhaseMoments`` says what is in it."""

    label: Action | str
    start: int
    end: int
    highest: Level


def phase_levels(rehearsed: Sequence[Levels], weights: Sequence[int]) -> list[PhaseLevels]:
    """The phases of the whole model.

    Args:
        rehearsed: the base, and one more of each kind of block; ``weights``: how often the difference of each counts.

    Raises:
        NotAlike: they do not do the same.
    """
    phases = [levels.phases for levels in rehearsed]
    if len({tuple(phase.label for phase in those) for those in phases}) != 1:
        raise NotAlike("with one block more, another schedule is run")
    return [_phase(those[0], those[1:], weights) for those in zip(*phases, strict=True)]


def items_of(rehearsed: Sequence[Levels], level: Level) -> tuple[dict[str, int], dict[Site, int]]:
    """What lives at a moment of the whole model: bytes by kind, and by site, the numbers of blocks left out."""
    if len(level.parts) == 1:
        ((number, _, moment),) = level.parts
        items, sites = rehearsed[number].items(moment.at)
        return items | ({KERNELS: moment.transient} if moment.transient else {}), sites
    items, sites = defaultdict[str, int](int), defaultdict[Site, int](int)
    for number, times, moment in level.parts:
        kinds, rehearsed_sites = rehearsed[number].items(moment.at)
        for kind, nbytes in (*kinds.items(), (KERNELS, moment.transient)):
            items[kind] += times * nbytes
        for (module, line, function), nbytes in rehearsed_sites.items():
            sites[module_pattern(module), line, function] += times * nbytes
    return _positive(items), _positive(sites)


def kinds_at(moments: Sequence[Level], rehearsed: Sequence[Levels]) -> dict[Level, dict[str, int]]:
    """Moment of the whole model → what lives at it: bytes by kind. Each rehearsal is gone through once."""
    kinds = []
    for number, levels in enumerate(rehearsed):
        events = {moment.at for level in moments for i, _, moment in level.parts if i == number}
        kinds.append(levels.kinds(events))
    kinds_of_level: dict[Level, dict[str, int]] = {}
    for level in dict.fromkeys(moments):
        items = defaultdict[str, int](int)
        for number, times, moment in level.parts:
            for kind, nbytes in (*kinds[number][moment.at].items(), (KERNELS, moment.transient)):
                items[kind] += times * nbytes
        kinds_of_level[level] = _positive(items)
    return kinds_of_level


def phases_of(rehearsed: Sequence[Sequence[Phase]], weights: Sequence[int]) -> list[Phase]:
    """The phases of the whole model in time."""
    base, *others = rehearsed
    return [
        replace(
            phase,
            spent=_spent(phase.spent, [other[i].spent for other in others], weights),
            exchanges=extrapolated(phase.exchanges, [other[i].exchanges for other in others], weights),
        )
        for i, phase in enumerate(base)
    ]


def linear(base: float, others: Sequence[float], weights: Sequence[int]) -> float:
    """base + Σ weight · (other − base)"""
    return base + sum(weight * (other - base) for other, weight in zip(others, weights, strict=True))


# --- memory -----------------------------------------------------------------------------------------------------------


def _phase(base: PhaseMoments, others: Sequence[PhaseMoments], weights: Sequence[int]) -> PhaseLevels:
    start = linear(base.start, [other.start for other in others], weights)
    end = linear(base.end, [other.end for other in others], weights)
    return PhaseLevels(base.label, round(start), round(end), _highest(base, others, weights))


def _highest(base: PhaseMoments, others: Sequence[PhaseMoments], weights: Sequence[int]) -> Level:
    alike = [_alike(base.moments, other.moments) for other in others]
    candidates = [
        _level(moment, [max(pairs[i], key=_nbytes) for pairs in alike], weights)
        for i, moment in enumerate(base.moments)
        if all(pairs[i] for pairs in alike)
    ]
    # What grows piece by piece in straight lines is never below the line through two of its values.
    highest = _level(max(base.moments, key=_nbytes), [max(other.moments, key=_nbytes) for other in others], weights)
    return max([highest, *candidates], key=lambda level: level.nbytes)


def _level(base: Moment, others: Sequence[Moment], weights: Sequence[int]) -> Level:
    nbytes = round(linear(base.nbytes, [other.nbytes for other in others], weights))
    more = [(i + 1, weight, other) for i, (other, weight) in enumerate(zip(others, weights, strict=True)) if weight]
    return Level(nbytes, ((0, 1 - sum(weight for _, weight, _ in more), base), *more))


def _alike(base: Sequence[Moment], other: Sequence[Moment]) -> list[list[Moment]]:
    """For each moment of the base those of another rehearsal that are like it: from the start, and from the end.

    From the end, all but the first block: nothing went before it in the base, and another block in the other rehearsal, whose
    gradients may still be on their way.
    """
    start = _common(base, other)
    end = _common(base[::-1], other[::-1]) - max(0, len(other) - len(base))
    pairs: list[list[Moment]] = [[] for _ in base]
    for i in range(start):
        pairs[i].append(other[i])
    for i in range(1, end + 1):
        pairs[-i].append(other[-i])
    return pairs


def _common(one: Sequence[Moment], other: Sequence[Moment]) -> int:
    """How many moments two begin with that are of the same functions."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.name != b.name:
            return i
    return min(len(one), len(other))


def _nbytes(moment: Moment) -> int:
    return moment.nbytes


def _positive(counts: Mapping[K, int]) -> dict[K, int]:
    return {key: count for key, count in counts.items() if count > 0}


# --- time -------------------------------------------------------------------------------------------------------------


def _spent(base: Spent, others: Sequence[Spent], weights: Sequence[int]) -> Spent:
    axes = dict.fromkeys(axis for spent in (base, *others) for axis in spent.exposed)
    return Spent(
        _seconds(base.device, [other.device for other in others], weights),
        _seconds(base.host, [other.host for other in others], weights),
        {
            axis: _seconds(
                base.exposed.get(axis, NOTHING), [other.exposed.get(axis, NOTHING) for other in others], weights
            )
            for axis in axes
        },
    )


def _seconds(base: Estimate, others: Sequence[Estimate], weights: Sequence[int]) -> Estimate:
    seconds = linear(base.seconds, [other.seconds for other in others], weights)
    scatter = max((e.scatter for e in (base, *others) if e.seconds), default=0.0)
    return Estimate(max(0.0, seconds), scatter)
