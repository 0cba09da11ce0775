"""``measured``: runs the plans of a search for some steps on this machine, sorts them by their measured seconds, and learns
from these what the profile has wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.amounts import duration_text
from meshwright.deferred import Build
from meshwright.hardware.correction import Correction, Part, corrected, learnt
from meshwright.prediction.predict import measure
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of
from meshwright.search.find import repeat_rows
from meshwright.search.result import Proposal, SearchResult
from meshwright.workers.pool import LocalWorkers


def measured(
    search_result: SearchResult,
    build: Build,
    batch: Any,
    *,
    steps: int,
    workers: LocalWorkers,
    global_batch: int | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    tell: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Measures the plans of a search in local processes. Returns the result with the plan of the fastest measured step first,
    and with the correction of the profile (``hardware.correction``).

    Args:
        search_result: the plans to measure.
        steps: at least 2. Each plan runs this number of steps to measure memory, and then as many again to measure time: the
            median counts.
        workers: at least as many as a plan has ranks, with as many threads each as in the measurement of the profile.
        global_batch: rows of a step, as in the search.

    The other arguments are those of ``find_plans``.

    Raises:
        WorkerError: a plan's run failed.
    """
    rows = repeat_rows(batch, global_batch or rows_of(batch))
    plans = []
    for proposal in search_result.plans:
        tell(f"running {proposal.plan.mesh}")
        run = measure(
            build, rows, proposal.plan, loss=loss, optimizer=optimizer, max_norm=max_norm, steps=steps, workers=workers
        )
        plans.append(replace(proposal, measured=run))
    plans.sort(key=lambda proposal: proposal.measured.seconds.seconds if proposal.measured is not None else 0.0)
    return replace(
        search_result, plans=tuple(plans), why=tuple(_why(plans)), correction=_correction(search_result, plans)
    )


def _correction(search_result: SearchResult, plans: Sequence[Proposal]) -> Correction | None:
    """What the measured seconds of the plans say of the profile."""
    estimator = search_result.estimator
    if estimator is None:
        return None

    candidates = [proposal.estimate.candidate for proposal in plans]
    estimated = [estimator.estimate(candidate).seconds for candidate in candidates]

    def seconds(factors: Mapping[Part, float]) -> list[float]:
        """The predicted seconds of each plan on the corrected profile: they change as the search's estimate does."""
        other = estimator.on(corrected(estimator.profile, factors))
        return [
            proposal.seconds * other.estimate(candidate).seconds / before
            for proposal, candidate, before in zip(plans, candidates, estimated, strict=True)
        ]

    return learnt(estimator.profile, seconds, [proposal.measured.seconds for proposal in plans if proposal.measured])


def _why(plans: Sequence[Proposal]) -> Iterator[str]:
    """Texts about each plan but the first: how much slower it is, and whether the difference is within the scatter."""
    best, *others = (
        (proposal.plan.mesh, proposal.measured.seconds) for proposal in plans if proposal.measured is not None
    )
    for mesh, seconds in others:
        yield f"{mesh} took {duration_text(seconds.seconds - best[1].seconds)} longer, measured"
        if best[1].high >= seconds.low:
            yield f"{mesh} is within the scatter of the first: more steps to be sure"
