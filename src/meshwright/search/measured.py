"""``measured``: the plans that a search found, run for some steps on this machine, and sorted by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.amounts import duration_text
from meshwright.deferred import Build
from meshwright.prediction.predict import measure
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of
from meshwright.search.find import Found, Proposal, repeated
from meshwright.workers.pool import LocalWorkers


def measured(
    found: Found,
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
) -> Found:
    """What a search found, its plans measured in local processes, the one with the fastest measured step first.

    Args:
        steps: of each plan, at least 2, of which memory is measured; as many again are timed, and their median counts.
        workers: at least as many as the plans have ranks, with as many threads each as the profile was measured with.
        global_batch: rows of a step, as the search had them.

    The other arguments are those of ``find_plans``.

    Raises:
        WorkerError: a plan's run failed.
    """
    rows = repeated(batch, global_batch or rows_of(batch))
    plans = []
    for proposal in found.plans:
        tell(f"running {proposal.plan.mesh}")
        run = measure(
            build, rows, proposal.plan, loss=loss, optimizer=optimizer, max_norm=max_norm, steps=steps, workers=workers
        )
        plans.append(replace(proposal, measured=run))
    plans.sort(key=lambda proposal: proposal.measured.seconds.seconds if proposal.measured is not None else 0.0)
    return replace(found, plans=tuple(plans), why=tuple(_why(plans)))


def _why(plans: Sequence[Proposal]) -> Iterator[str]:
    """By how much the others are slower, as measured, and whether scatter may have decided that."""
    best, *others = ((one.plan.mesh, one.measured.seconds) for one in plans if one.measured is not None)
    for mesh, seconds in others:
        yield f"{mesh} took {duration_text(seconds.seconds - best[1].seconds)} longer, measured"
        if best[1].high >= seconds.low:
            yield f"{mesh} is within the scatter of the first: more steps to be sure"
