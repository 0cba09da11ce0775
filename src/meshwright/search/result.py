"""``SearchResult``: what a search found: the best plans, and the families of which no plan fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.hardware.correction import Correction
from meshwright.hardware.profile import Estimate
from meshwright.plan import Plan
from meshwright.prediction.result import Prediction
from meshwright.search.estimate import CandidateEstimate, Estimator
from meshwright.search.space import Candidate, Family


@dataclass(frozen=True)
class Proposal:
    """A plan that was found.

    Attributes:
        plan: a complete plan, ready to run.
        estimate: the search ranked the plan by it.
        prediction: of ``predict``; None if the plan was not rehearsed.
        measured: of a run on this machine; None if the plan was not run.
    """

    plan: Plan
    estimate: CandidateEstimate
    prediction: Prediction | None = None
    measured: Prediction | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step: the prediction; without it, the estimate."""
        return self.prediction.seconds.seconds if self.prediction is not None else self.estimate.seconds

    @property
    def nbytes(self) -> float:
        """Peak bytes of the rank that needs most memory: the prediction; without it, the estimate."""
        return float(self.prediction.peak) if self.prediction is not None else self.estimate.nbytes

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the seconds."""
        if self.prediction is not None:
            return self.prediction.seconds.low, self.prediction.seconds.high
        seconds = Estimate(self.estimate.seconds, self.estimate.scatter)
        return seconds.low, seconds.high

    @property
    def terms(self) -> Mapping[str, float]:
        """Name of a part of the step → its seconds."""
        return self.prediction.seconds.waterfall if self.prediction is not None else self.estimate.terms


@dataclass(frozen=True)
class RejectedFamily:
    """A family of plans, with equal pp and tp, of which none fits in memory.

    Attributes:
        family: the family.
        count: number of plans in the family.
        least: the plan of the family that needs least memory.
        nbytes: the bytes of a device that ``least`` needs.
        capacity: the bytes that a device has.
        change: the smallest change with which ``least`` would fit, as text; empty if there is none.
    """

    family: Family
    count: int
    least: Candidate
    nbytes: float
    capacity: float
    change: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        plans: the best plans, at most one of each family, fastest first.
        considered: number of candidates that were estimated.
        fitting: number of these that fit in memory.
        frontier: the Pareto frontier of seconds and bytes, by the estimates of the candidates that fit; smallest bytes first.
        rejected: families of which no plan fits.
        why: texts: why the first plan is faster than each of the others.
        notes: texts about the limits of the search.
        estimator: of all candidates.
        correction: what the measured seconds of the plans say of the profile; None if no plan was run.
    """

    plans: tuple[Proposal, ...]
    considered: int
    fitting: int
    frontier: tuple[CandidateEstimate, ...] = ()
    rejected: tuple[RejectedFamily, ...] = ()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    estimator: Estimator | None = field(default=None, repr=False, compare=False)
    correction: Correction | None = None
