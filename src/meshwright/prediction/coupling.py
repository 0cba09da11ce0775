"""``coupling_of``: what a run's trial of rows would find (``runtime/coupling/trial.py``): why the rows of a batch are coupled.

    batch statistics in training     seen in the rehearsals of any model
    all else                         the trial itself, on this machine, with random weights, if the model is small

If rows are coupled, every data rank runs all rows, in one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.code_state import code_state_kept
from meshwright.deferred import Build
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.prediction.rehearsal import Rehearsal
from meshwright.prediction.world import rehearsed_world
from meshwright.runtime.apply import apply
from meshwright.runtime.coupling.attempt import COUPLED
from meshwright.runtime.coupling.trial import ALL_ROWS, MOST_ROWS, Verdict, notes
from meshwright.runtime.groups import make_groups
from meshwright.runtime.rows.batch import copied, tensors_in
from meshwright.runtime.rows.microbatches import take_rows

MOST_ELEMENTS, MOST_FLOPS = 2e7, 2e9
"""The largest model that is tried here: its parameter elements, and the floating-point operations of a forward of as many
rows as a trial has. A trial runs some 20 forwards."""


def coupling_of(
    build: Build, rehearsal: Rehearsal, *, batch_statistics: bool, flops: Callable[[], float]
) -> str | None:
    """The note of a run that finds the rows of a batch coupled; None if it would not find that, or if it is not known.

    Args:
        build: makes the model, with values.
        rehearsal: of a step.
        batch_statistics: whether a rehearsed forward computes statistics of several rows.
        flops: returns the floating-point operations of a forward of one row.
    """
    recipe, rows = rehearsal.recipe, rehearsal.rows
    if recipe.rows != "auto" or recipe.mesh.data_size * recipe.microbatches == 1 or rows < 2:
        return None
    if batch_statistics:
        return notes(Verdict(COUPLED))[0]
    elements = sum(p.numel() for p in rehearsal.planned.model.parameters())
    if elements > MOST_ELEMENTS or flops() * min(rows, MOST_ROWS) > MOST_FLOPS:
        return None
    return None if any(t.is_meta for t in tensors_in(rehearsal.batch)) else _note_of_trial(build, rehearsal)


def _note_of_trial(build: Build, rehearsal: Rehearsal) -> str | None:
    """Runs a step of a few rows on one rank, which begins with the trial. Returns its note on coupled rows.

    Returns:
        None if rows are not coupled, or if the step fails.
    """
    recipe = rehearsal.recipe
    batch = copied(take_rows(rehearsal.marked_batch, 0, MOST_ROWS))  # the model may write to it
    # Whether a piece of a step may be a single row.
    single = rehearsal.rows < 2 * recipe.mesh.data_size * recipe.microbatches
    plan = {"mesh": "dp_shard=1", "microbatches": min(rehearsal.rows, MOST_ROWS) if single else 2}
    parsed = Plan.parse({**plan, "precision": recipe.precision, "seed": recipe.seed})
    loss, dtype = rehearsal.loss, rehearsal.dtype
    try:
        with rehearsed_world(0, 1), code_state_kept(build):
            planned = Planned(build, parsed, batch, loss, dtype, whole_batch=True)
            groups = make_groups(planned.recipe, torch.device("cpu"))
            job = apply(build, planned.recipe, groups, loss=loss, replanner=planned, dtype=dtype)
            job.step(batch)
    except Exception:  # a model may raise anything
        return None
    return next((note for note in job.notes if ALL_ROWS in note), None)
