"""Memory and seconds of a full model, extrapolated from rehearsals with few blocks. Both are linear in the number of blocks.

    base        embed  b0 b1    b79 head │ head b79    b1 b0 embed
    one more    embed  b0 b1 b2 b79 head │ head b79 b2 b1 b0 embed
                └ equal from the start ┘               └ equal from the end

A moment of the base corresponds to a moment of the rehearsal with one more block: one at the same distance from the start
of its action, or at the same distance from its end. In the full model, ``base + n · (one more − base)`` bytes live at this
moment, if the base lacks n blocks. The bytes at moments of blocks in between lie between those of the first and of the last
block, so that the peak is among the moments of the base.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from meshwright.hardware.profile import NOTHING, Estimate
from meshwright.prediction.clock import Phase, PhaseSeconds
from meshwright.prediction.exchanges import extrapolated, module_pattern
from meshwright.prediction.memory import KERNELS, Levels, Moment, PhaseMoments, Site
from meshwright.prediction.passing import UnlikePatternError
from meshwright.schedule import Action

Part = tuple[int, int, Moment]
"""(number of a rehearsal, its weight, a moment of it)"""
K = TypeVar("K", bound=Hashable)
_SAME = 0.02
"""Differences between the bytes of two rehearsals that differ by less are one difference: small tensors may live longer."""


@dataclass(frozen=True)
class Level:
    """A moment of the full model.

    Attributes:
        nbytes: bytes that live.
        parts: the moments of rehearsals whose weighted sum this is.
    """

    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class PhaseLevels:
    """The memory of an action or phase of the full model.

    Attributes:
        label: the action, or the name of the phase.
        start, end: bytes that live when it begins, and when it has ended.
        highest: the moment at which most bytes live.
    """

    label: Action | str
    start: int
    end: int
    highest: Level


def phase_levels(rehearsed: Sequence[Levels], weights: Sequence[int]) -> list[PhaseLevels]:
    """The memory of each action and phase of the full model.

    Args:
        rehearsed: memory of the base, and of each rehearsal with one more block.
        weights: for each rehearsal with one more block, the number of blocks that the base lacks.

    Raises:
        NotAlike: the rehearsals have different actions.
    """
    phases = [levels.phases for levels in rehearsed]
    if len({tuple(phase.label for phase in one_each) for one_each in phases}) != 1:
        raise UnlikePatternError("with one more block, the model runs another schedule")
    return [_phase(one_each[0], one_each[1:], weights) for one_each in zip(*phases, strict=True)]


def items_of(rehearsed: Sequence[Levels], level: Level) -> tuple[dict[str, int], dict[Site, int]]:
    """The memory at a moment of the full model: (kind → bytes, site → bytes). Modules of sites have ``*`` for numbers."""
    if len(level.parts) == 1:
        ((number, _, moment),) = level.parts
        items, sites = rehearsed[number].items(moment.at)
        return items | ({KERNELS: moment.transient} if moment.transient else {}), sites
    items, sites = defaultdict[str, int](int), defaultdict[Site, int](int)
    for number, weight, moment in level.parts:
        kinds, rehearsed_sites = rehearsed[number].items(moment.at)
        for kind, nbytes in (*kinds.items(), (KERNELS, moment.transient)):
            items[kind] += weight * nbytes
        for (module, line, function), nbytes in rehearsed_sites.items():
            sites[module_pattern(module), line, function] += weight * nbytes
    return _positive(items), _positive(sites)


def kinds_at(moments: Sequence[Level], rehearsed: Sequence[Levels]) -> dict[Level, dict[str, int]]:
    """Moment of the full model → kind → bytes that live at it. Reads the events of each rehearsal only once."""
    kinds = []
    for number, levels in enumerate(rehearsed):
        events = {moment.at for level in moments for i, _, moment in level.parts if i == number}
        kinds.append(levels.kinds(events))
    kinds_of_level: dict[Level, dict[str, int]] = {}
    for level in dict.fromkeys(moments):
        items = defaultdict[str, int](int)
        for number, weight, moment in level.parts:
            for kind, nbytes in (*kinds[number][moment.at].items(), (KERNELS, moment.transient)):
                items[kind] += weight * nbytes
        kinds_of_level[level] = _positive(items)
    return kinds_of_level


def phases_of(rehearsed: Sequence[Sequence[Phase]], weights: Sequence[int]) -> list[Phase]:
    """The seconds and collectives of each action and phase of the full model. Arguments: as those of ``phase_levels``."""
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
    """base + Σ weight · (other − base)."""
    return base + sum(weight * (other - base) for other, weight in zip(others, weights, strict=True))


# --- memory -----------------------------------------------------------------------------------------------------------


def _phase(base: PhaseMoments, others: Sequence[PhaseMoments], weights: Sequence[int]) -> PhaseLevels:
    start = linear(base.start, [other.start for other in others], weights)
    end = linear(base.end, [other.end for other in others], weights)
    return PhaseLevels(base.label, round(start), round(end), _highest(base, others, weights))


def _highest(base: PhaseMoments, others: Sequence[PhaseMoments], weights: Sequence[int]) -> Level:
    """The moment of an action in the full model at which most bytes live."""
    matches = [_alike(base.moments, other.moments) for other in others]
    candidates = [
        _level(
            moment,
            [
                max((other.moments[j] for j in match[i]), key=_nbytes)
                for other, match in zip(others, matches, strict=True)
            ],
            weights,
        )
        for i, moment in enumerate(base.moments)
        if all(match[i] for match in matches)
    ]
    peak, *peaks = (max(range(len(phase.moments)), key=lambda i: phase.moments[i].nbytes) for phase in (base, *others))
    if candidates and all(
        match[peak] and any(other_peak in numbers for numbers in match)
        for match, other_peak in zip(matches, peaks, strict=True)
    ):
        return max(candidates, key=lambda level: level.nbytes)
    # The peak of a rehearsal has no counterpart in another one. It is a maximum of linear functions of the number of blocks, so
    # it is convex: beyond the two numbers of blocks that were rehearsed, it is never below the line through their peaks.
    line = _level(base.moments[peak], [other.moments[i] for other, i in zip(others, peaks, strict=True)], weights)
    return max([line, *candidates], key=lambda level: level.nbytes)


def _level(base: Moment, others: Sequence[Moment], weights: Sequence[int]) -> Level:
    """The moment of the full model that corresponds to a moment of the base and one of each other rehearsal."""
    nbytes = round(linear(base.nbytes, [other.nbytes for other in others], weights))
    more = [(i + 1, weight, other) for i, (other, weight) in enumerate(zip(others, weights, strict=True)) if weight]
    return Level(nbytes, ((0, 1 - sum(weight for _, weight, _ in more), base), *more))


def _alike(base: Sequence[Moment], other: Sequence[Moment]) -> list[set[int]]:
    """For each moment of the base, the moments of another rehearsal that correspond to it: from the start, and from the end."""
    start, end = _common(base, other), _common(base[::-1], other[::-1])
    matches: list[set[int]] = [set() for _ in base]
    for i in range(start):
        matches[i].add(i)
    for i in range(1, end + 1):
        matches[-i].add(len(other) - i)
    return matches


def _common(one: Sequence[Moment], other: Sequence[Moment]) -> int:
    """Number of moments from the start at which both rehearsals do the same.

    They run the same functions, in the same modules, and one has always so many bytes more than the other. The bytes tell
    blocks apart that call the same functions in a backward, which has no modules.
    """
    difference: int | None = None
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        difference = b.nbytes - a.nbytes if difference is None else difference
        if (a.name, a.module) != (b.name, b.module) or abs(b.nbytes - a.nbytes - difference) > _SAME * abs(difference):
            return i
    return min(len(one), len(other))


def _nbytes(moment: Moment) -> int:
    return moment.nbytes


def _positive(counts: Mapping[K, int]) -> dict[K, int]:
    return {key: count for key, count in counts.items() if count > 0}


# --- time -------------------------------------------------------------------------------------------------------------


def _spent(base: PhaseSeconds, others: Sequence[PhaseSeconds], weights: Sequence[int]) -> PhaseSeconds:
    axes = dict.fromkeys(axis for spent in (base, *others) for axis in spent.exposed)
    return PhaseSeconds(
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
