"""``learnt``: corrects a profile by the measured seconds of steps.

| quantity | equation | function |
| --- | --- | --- |
| corrected seconds | factor · seconds, for each part of a profile | `corrected` |
| factors f | minimize Σᵢ ρ(ln(measuredᵢ / predictedᵢ(f)) / σᵢ) + Σₖ (ln fₖ / scatterₖ)² | `learnt` |
| σ | √(``MODEL``² + the scatter of the measured seconds²) | `learnt` |
| ρ(z) | z² to \\|z\\| = 2, and linear beyond | `_robust` |

The first sum is the error of the steps. The second holds each factor near 1, the more so the surer the profile is of the part.
Together they give the most probable factors, if errors and factors are log-normal (Tarantola, Inverse Problem Theory, SIAM
2005, section 3.2). ρ is Huber's, so a step that something else disturbed decides nothing (Huber, Robust Estimation of a
Location Parameter, 1964). The search is Hooke and Jeeves's ("Direct Search" Solution of Numerical and Statistical Problems,
JACM 1961), since predicted seconds are made of maxima, and have kinks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, hypot, log
from typing import TypeAlias

from meshwright.hardware.profile import Estimate, Link, Profile
from meshwright.hardware.text import HOST

Part: TypeAlias = str
"""A part of a profile that one factor corrects: ``products`` (and attention), ``memory`` (every other function), ``host``,
``node`` and ``network`` (their links)."""

PARTS: tuple[Part, ...] = ("products", "memory", "host", "node", "network")
MODEL = 0.05
"""Scatter of measured seconds around those of the best profile: a prediction leaves things out."""
OTHER_HOST = 0.5
"""Scatter of the host's seconds in the profile of an accelerator: the profile cannot know the CPU beside it."""
MOST = 4.0  # a factor at most, or its inverse
_STEPS = (0.7, 0.35, 0.17, 0.08, 0.04, 0.02)  # of ln f, one after the other
_NOTE = "; corrected: "  # in the notes of a profile, before the factors of its last correction
_NEGLIGIBLE = 0.02  # |ln f| below which a part is left as it is


@dataclass(frozen=True)
class Correction:
    """What steps said of a profile.

    Attributes:
        profile: the corrected profile.
        factors: part → corrected seconds / those of the profile, without the parts that are left as they are.
        before, after: mean of |predicted / measured − 1| over the steps, with the profile and with the corrected one.
        seconds: of each step, in their order, with the profile and with the corrected one.
    """

    profile: Profile
    factors: Mapping[Part, float]
    before: float
    after: float
    seconds: tuple[tuple[float, float], ...] = ()


def learnt(
    profile: Profile, predict: Callable[[Mapping[Part, float]], Sequence[float]], measured: Sequence[Estimate]
) -> Correction:
    """The profile that agrees best with the measured seconds of steps, and is not far from what it was.

    Args:
        profile: the profile of the devices that ran the steps.
        predict: factors → the seconds of each step that the profile predicts if it is ``corrected`` by them.
        measured: the measured seconds of each step, in the same order, with their scatter.
    """
    scatters = _scatters(profile)
    took = [estimate.seconds for estimate in measured]
    deviations = [hypot(MODEL, estimate.scatter) for estimate in measured]

    @cache
    def cost(logs: tuple[float, ...]) -> float:
        predicted = predict(_factors(scatters, logs))
        errors = (log(seconds / said) for seconds, said in zip(took, predicted, strict=True))
        return sum(_robust(error / deviation) for error, deviation in zip(errors, deviations, strict=True)) + sum(
            (value / scatter) ** 2 for value, scatter in zip(logs, scatters.values(), strict=True)
        )

    factors = {
        part: factor
        for part, factor in _factors(scatters, _least(cost, len(scatters))).items()
        if abs(log(factor)) >= _NEGLIGIBLE
    }
    before, after = predict({}), predict(factors)
    seconds = tuple(zip(before, after, strict=True))
    return Correction(corrected(profile, factors), factors, _error(before, took), _error(after, took), seconds)


def corrected(profile: Profile, factors: Mapping[Part, float]) -> Profile:
    """The profile in which each of these parts takes ``factor`` times as long. Its notes say so."""
    if not factors:
        return profile
    said = ", ".join(f"{part} × {factor:.2f}" for part, factor in factors.items())
    products, memory, host = (factors.get(part, 1.0) for part in ("products", "memory", "host"))
    return replace(
        profile,
        notes=f"{profile.notes.partition(_NOTE)[0]}{_NOTE}{said}",
        peak={dtype: rate / products for dtype, rate in profile.peak.items()},
        bandwidth=profile.bandwidth / memory,
        launch=profile.launch * memory,
        node=_slower(profile.node, factors.get("node", 1.0)),
        network=profile.network and _slower(profile.network, factors.get("network", 1.0)),
        **{name: getattr(profile, name) * host for name in HOST},
    )


def _slower(link: Link, factor: float) -> Link:
    return replace(link, latency=link.latency * factor, start=link.start * factor, bandwidth=link.bandwidth / factor)


def _scatters(profile: Profile) -> dict[Part, float]:
    """Part → the relative standard deviation of its seconds, of the parts that the profile has and is not sure of."""
    scatters = {
        "products": profile.scatter,
        "memory": profile.scatter,
        "host": profile.scatter if profile.cores else OTHER_HOST,
        "node": profile.node.scatter,
        "network": profile.network.scatter if profile.network is not None else 0.0,
    }
    return {part: scatter for part, scatter in scatters.items() if scatter}


def _factors(parts: Sequence[Part] | Mapping[Part, float], logs: Sequence[float]) -> dict[Part, float]:
    return {part: exp(value) for part, value in zip(parts, logs, strict=True)}


def _robust(z: float) -> float:
    """Huber's ρ, which a single large error does not rule."""
    return z * z if abs(z) <= 2 else 4 * abs(z) - 4


def _least(cost: Callable[[tuple[float, ...]], float], number: int) -> tuple[float, ...]:
    """The point with the least cost that Hooke and Jeeves's search finds from 0, in ``number`` dimensions."""
    point = (0.0,) * number
    for step in _STEPS:
        while (better := _neighbour(cost, point, step)) is not None:
            point = better
    return point


def _neighbour(
    cost: Callable[[tuple[float, ...]], float], point: tuple[float, ...], step: float
) -> tuple[float, ...] | None:
    """The point after a step along each axis that lowers the cost; None if no step does."""
    better = point
    for axis in range(len(point)):
        for moved in (step, -step):
            tried = (*better[:axis], round(better[axis] + moved, 6), *better[axis + 1 :])
            if abs(tried[axis]) <= log(MOST) and cost(tried) < cost(better):
                better = tried
                break
    return None if better == point else better


def _error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured − 1|."""
    return sum(abs(said / seconds - 1) for said, seconds in zip(predicted, measured, strict=True)) / len(measured)
