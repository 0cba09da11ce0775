"""``chosen_plan``: the plan that ``mesh: auto`` stands for: the first that ``find_plans`` gives and that the model takes."""

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
from meshwright.search.find import Found, Proposal, find_plans, repeated


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
    """The plan, and what was chosen and why. From a plain process.

    Args:
        plan: with ``mesh: auto``. What it says is kept; the mesh is found, and what it leaves out of ``plan.keys.SEARCHED``.

    The other arguments are those of ``find_plans``.

    Raises:
        PlanError: no plan fits, or the model takes none of the best.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    said = {"precision": plan.precision, **plan.settings()}
    del said["mesh"]
    found = find_plans(
        build, batch, devices=devices, nodes=nodes, global_batch=global_batch, hardware=profile, options=said,
        loss=loss, tell=tell,
    )  # fmt: skip
    rows = global_batch or rows_of(batch)
    first = _first_taken(build, repeated(batch, rows), found, loss)
    return first.plan, tuple(_notes(found, first, plan, f"{devices} ranks of {profile.name} and {rows} rows a step"))


def _first_taken(build: Build, batch: Any, found: Found, loss: Loss | None) -> Proposal:
    """The first whose plan can be made into a recipe: entries of modules may ask for what not every mesh has."""
    problems: list[PlanError] = []
    for proposal in found.plans:
        try:
            make_recipe(build, proposal.plan, batch, loss)
        except PlanError as problem:
            problems.append(problem)
        else:
            return proposal
    raise problems[0]


def _notes(found: Found, first: Proposal, plan: Plan, where: str) -> list[str]:
    terms = sorted(first.terms.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{term} {seconds / first.seconds:.0%}" for term, seconds in terms if seconds > 0)
    chosen = first.plan.settings()
    beside = [f"{key}: {str(chosen[key]).lower()}" for key in SEARCHED if key in chosen and key not in plan.said]
    return [
        f"mesh: {first.plan.mesh}{''.join(f', {setting}' for setting in beside)}: found by mesh: auto for {where}, of"
        f" {found.considered} plans, of which {found.fitting} fit; a step is estimated at"
        f" {duration_text(first.seconds)} ({shares})",
        *(found.why if first is found.plans[0] else ()),
        *found.notes,
    ]
