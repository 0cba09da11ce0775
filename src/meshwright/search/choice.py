"""``chosen_plan``: the plan for ``mesh: auto``: the first plan of ``find_plans`` that can be made into a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.amounts import duration_text
from meshwright.deferred import Build
from meshwright.errors import PlanError
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan
from meshwright.plan.keys import SEARCHED
from meshwright.planned import make_recipe
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of
from meshwright.search.find import find_plans, repeat_rows
from meshwright.search.result import Proposal, SearchResult


def chosen_plan(
    build: Build,
    batch: Any,
    plan: Plan,
    *,
    devices: int,
    hardware: str | Profile,
    nodes: int | None = None,
    global_batch: int | None = None,
    loss: Loss | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Plan, tuple[str, ...]]:
    """Completes a plan with ``mesh: auto``. Call it in a plain process, without a process group.

    Args:
        plan: with ``mesh: auto``. Its settings stay. The search chooses the mesh, and those of ``plan.keys.SEARCHED`` that the
            plan does not set.

    The other arguments are those of ``find_plans``.

    Returns:
        (the plan, notes that say what was chosen and why).

    Raises:
        PlanError: no plan fits in memory, or none of the best can be made into a recipe.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    settings = {"precision": plan.precision, **plan.settings()}
    del settings["mesh"]
    search_result = find_plans(
        build, batch, devices=devices, nodes=nodes, global_batch=global_batch, hardware=profile, options=settings,
        loss=loss, tell=tell,
    )  # fmt: skip
    rows = global_batch or rows_of(batch)
    first = _first_taken(build, repeat_rows(batch, rows), search_result, loss)
    return first.plan, tuple(
        _notes(search_result, first, plan, f"{devices} ranks of {profile.name} and {rows} rows a step")
    )


def _first_taken(build: Build, batch: Any, search_result: SearchResult, loss: Loss | None) -> Proposal:
    """The first proposal whose plan can be made into a recipe. Entries of ``modules`` may need an axis that a mesh lacks.

    Raises:
        PlanError: of the first proposal, if no plan can be made into a recipe.
    """
    problems: list[PlanError] = []
    for proposal in search_result.plans:
        try:
            make_recipe(build, proposal.plan, batch, loss)
        except PlanError as problem:
            problems.append(problem)
        else:
            return proposal
    raise problems[0]


def _notes(search_result: SearchResult, first: Proposal, plan: Plan, size: str) -> list[str]:
    """The notes about a chosen plan. ``size``: the devices and rows of a step, as text."""
    terms = sorted(first.terms.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{term} {seconds / first.seconds:.0%}" for term, seconds in terms if seconds > 0)
    chosen = first.plan.settings()
    added = [f"{key}: {str(chosen[key]).lower()}" for key in SEARCHED if key in chosen and key not in plan.said]
    return [
        f"mesh: {first.plan.mesh}{''.join(f', {setting}' for setting in added)}: found by mesh: auto for {size}, of"
        f" {search_result.considered} plans, of which {search_result.fitting} fit; a step is estimated at"
        f" {duration_text(first.seconds)} ({shares})",
        *(search_result.why if first is search_result.plans[0] else ()),
        *search_result.notes,
    ]
