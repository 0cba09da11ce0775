"""``resolve``: any module and a plan → a recipe. Each pass makes decisions and gives their reasons.

1  the plan's entries  the settings for each module and parameter; problems of the plan by itself
2  the program         the recorded forward, if stages or branches each run a part of it; where branches part and join
3  units and shards    what FSDP2 gathers at once; what tensor parallelism shards, found from the forward (planning/tensor.py)
4  stages              where the program is cut, and what stages and branches change in units, recomputation and buffers
5  the recipe          one line for each parameter; or one error with every problem

Each pass takes a draft (planning/draft.py) and returns the next one. ``stop_if_wrong`` raises all problems so far, before
passes that need a plan without problems.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from torch import nn

from meshwright.plan import Plan
from meshwright.planning.compiled import compile_notes, compiled_notes
from meshwright.planning.draft import Draft, Names, Run
from meshwright.planning.passes.branches import place_branches, read_branches
from meshwright.planning.passes.checks import (
    check_classes,
    check_hooks,
    check_made,
    check_rows,
    check_scripted,
    check_tp,
    stop_if_wrong,
    tell_dense,
)
from meshwright.planning.passes.entries import find_concurrent, read_entries
from meshwright.planning.passes.parameters import (
    keep_objects,
    keep_other_types,
    keep_shared_by_units,
    keep_written,
    parameter_lines,
)
from meshwright.planning.passes.program import record_forward
from meshwright.planning.passes.recompute import (
    choose_recompute,
    keep_changed_later,
    recompute_in_branches,
    recompute_in_stages,
)
from meshwright.planning.passes.shards import check_refused, shard_over_tp
from meshwright.planning.passes.stages import (
    check_shared,
    choose_schedule,
    cut_into_stages,
    place_buffers,
    tell_shared,
)
from meshwright.planning.passes.units import (
    choose_units,
    close_units,
    find_blocks,
    keep_units_in_branches,
    keep_units_in_stages,
)
from meshwright.recipe import Recipe

PASSES: tuple[Callable[[Draft], Draft], ...] = (
    # 1  the plan's entries
    read_entries, check_rows, check_tp, check_scripted, check_hooks, check_classes, tell_dense, find_concurrent,
    read_branches, stop_if_wrong,
    # 2  the program
    find_blocks, record_forward, place_branches, stop_if_wrong,
    # 3  units and shards
    choose_units, choose_recompute, shard_over_tp, check_refused, check_made, stop_if_wrong, close_units,
    keep_written, keep_objects, keep_changed_later,
    # 4  stages
    cut_into_stages, choose_schedule, keep_units_in_stages, recompute_in_stages, tell_shared, place_buffers,
    recompute_in_branches, keep_units_in_branches, check_shared, stop_if_wrong,
    # 5  the recipe
    keep_shared_by_units, keep_other_types, stop_if_wrong,
)  # fmt: skip


def resolve(model: nn.Module, plan: Plan, run: Run, batch: Any = None, *, whole_batch: bool = False) -> Recipe:
    """The recipe for ``model`` under ``plan``.

    Args:
        model: the model, with parameters on the meta device and real buffers.
        run: runs the model's forward on the sample batch, and the loss on its output.
        batch: the sample batch, for its number of rows.
        whole_batch: whether the sample has the rows of all data ranks together.

    Raises:
        PlanError: with every problem.
    """
    first = Draft(model, plan, run, batch, whole_batch, Names.of(model))
    return recipe_of(reduce(lambda draft, next_pass: next_pass(draft), PASSES, first))


def recipe_of(draft: Draft) -> Recipe:
    """The recipe for a draft after all passes."""
    plan, branches = draft.plan, draft.branches
    return Recipe(
        mesh=plan.mesh,
        parameters=parameter_lines(draft),
        units=draft.units,
        recompute=draft.recompute,
        blocks=draft.blocks,
        sequence=draft.sequence,
        microbatches=plan.microbatches or draft.microbatches,
        precision=plan.precision,
        reshard_after_forward=_reshards(plan),
        rows=plan.rows,
        stages=draft.stages,
        schedule=draft.schedule,
        buffers=draft.buffers,
        branches=branches.places,
        placed=branches.placed,
        streams=branches.streams,
        routed=draft.routed,
        referenced_outside=draft.referenced_outside,
        seed=plan.seed,
        nonfinite=plan.nonfinite,
        verify=plan.verify,
        eager=plan.eager,
        compile=plan.compile,
        weights=plan.weights,
        notes=(*draft.notes, *compiled_notes(draft.model, plan.mesh, bool(branches)), *compile_notes(plan)),
        plan=plan.dump(),
    )


def _reshards(plan: Plan) -> bool:
    if plan.mesh.axis_size("pp") == 1:
        return plan.reshard_after_forward is not False
    # The two halves of a zero-bubble backward need the parameters that the forward gathered.
    return bool(plan.reshard_after_forward) and plan.schedule != "zero_bubble"
