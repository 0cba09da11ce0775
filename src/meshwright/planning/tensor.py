"""Which parameters are sharded over ``tp``, and how: found by running the model's own forward on meta tensors.

    a linear with a replicated input is sharded by column; one with a sharded input is sharded by row

The forward runs through the deciders of a real run. Every sharded tensor lists the parameters from which its layout comes. If
it does not fit, the planner learns a constraint on these parameters:

    a split, chunk or unbind has k blocks in the sharded dim      shard each block by itself (a fused QKV)
    a view has heads in the sharded dim                           do not break a head
    it is gathered again (a function without a rule …)       not worth it: replicate the parameter

Then the forward runs again, until it runs without a new constraint. A constraint holds for a family: the corresponding
parameters of all repeated blocks (planning/families.py).

A parameter that the plan says to shard is always sharded: if its layout does not fit, it is gathered where it is used. The plan
may say column or row for a parameter that no matrix product uses directly (``weight_norm``, ``scale * weight``). Then each dim
is tried, and the first is chosen whose shards a matrix product uses as column or row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.planning.families import families
from meshwright.planning.known_shapes import KnownShapes, ShapeEntries
from meshwright.planning.parameter_shards import ParameterShards, Style, dims_of_style
from meshwright.planning.planner import Decisions, Planner, Reading, StyleChanged
from meshwright.planning.shadow import Shadow
from meshwright.planning.units import ParameterUses
from meshwright.private import storage_of
from meshwright.spmd.autograd_functions import custom_functions
from meshwright.spmd.comm import Ledger, PlannedAxis
from meshwright.spmd.dispatcher import Dispatcher

# Each pass but the last learns something about a family, and a family's style changes ``planner._PATIENCE`` times at most.
# Only a mistake of ours, or a model of hundreds of families that all change, needs more passes.
_MOST_PASSES = 400
# A table of an embedding is sharded over its rows if it has at least one in so many of the elements of the largest parameter.
# The memory of a smaller one is not worth an all-reduce.
_LARGE = 8


def infer_shards(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    *,
    axis: str,
    size: int,
    styles: Mapping[str, Style],
    names: Mapping[int, str],
    seeds: Callable[[Dispatcher], Any] | None = None,
    uses: ParameterUses | None = None,
) -> ParameterShards:
    """Finds the shards of ``model`` (parameters on meta) over an axis of ``size`` ranks.

    Args:
        run: runs the model's forward.
        axis: the name of the mesh axis.
        styles: parameter → its style by the plan or by the model.
        names: ``id(parameter)`` → its name.
        seeds: returns a context manager that shards the inputs of blocks over the sequence.
        uses: records which parameters the forward uses, and where.
    """

    family_of = families(model, names.values())

    def follow(styles: Mapping[str, Style]) -> SettledForward:
        return _followed(model, run, axis, size, styles, names, family_of, seeds, uses)

    followed = follow(styles)
    dims = {names[id(p)]: p.dim() for p in model.parameters() if id(p) in names}
    for group in _still_whole(followed.planner, dims):
        kind, before = styles[group[0]].kind, styles
        tried = {}
        for dim in dims_of_style(kind, dims[group[0]]):
            styles = {**before, **{name: replace(before[name], kind="shard", dim=dim) for name in group}}
            tried[dim] = styles, follow(styles)
            roles = tried[dim][1].planner.roles.get(group[0], [kind])  # if no product uses it, the first dim is taken
            if kind in roles:
                break
        else:
            dim = next(iter(tried))
        styles, followed = tried[dim]
    planner = followed.planner
    ledger = planner.dispatcher.ledger
    return ParameterShards(
        planner.layouts, planner.reasons(), ledger, followed.reads, planner.refused, followed.selects
    )


def _still_whole(planner: Planner, dims: Mapping[str, int]) -> list[list[str]]:
    """Groups of parameters, by family, that the plan says to shard by column or row and that are still not sharded. Without
    vectors, which follow their weights."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, style in planner.styles.items():
        if style.forced and style.kind in ("column", "row") and name not in planner.layouts and dims.get(name, 0) > 1:
            groups.setdefault((planner.families.get(name, name), style.kind), []).append(name)
    return list(groups.values())


@dataclass(frozen=True)
class SettledForward:
    """The last run of a forward, in which no style changed.

    Attributes:
        reads: how many values it read; ``selects``: how many of its sizes depend on values.
    """

    planner: Planner
    reads: int
    selects: int


def _followed(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    axis: str,
    size: int,
    styles: Mapping[str, Style],
    names: Mapping[int, str],
    families: Mapping[str, str],
    seeds: Callable[[Dispatcher], Any] | None,
    uses: ParameterUses | None,
) -> SettledForward:
    learnt: dict[str, Style] = {}
    news: dict[str, int] = {}
    asked, decisions = ShapeEntries(), Decisions()  # caches: results on meta and decisions are the same in each pass
    large = max((p.numel() for p in model.parameters()), default=0) // _LARGE
    for _ in range(_MOST_PASSES):
        planner = Planner(PlannedAxis(axis, size, 0, Ledger()), names, styles, learnt, news, large, model)
        planner.take(decisions)
        planner.families = families
        mode, shadow = Reading(planner), Shadow(watch=uses.escapes.op if uses is not None else None)
        functions = KnownShapes(shadow, asked)
        shadow.memory = planner.memory = {storage_of(p): names[id(p)] for p in model.parameters() if p.is_meta}
        try:
            with ExitStack() as stack:
                for context in (torch.no_grad(), shadow, functions, mode.on()):
                    stack.enter_context(context)
                if seeds is not None:
                    stack.enter_context(seeds(planner.dispatcher))
                if uses is not None:
                    planner.uses = uses
                    stack.enter_context(uses.watching(partial(getattr, shadow, "writes")))
                    stack.enter_context(uses.escapes.watching())
                    stack.enter_context(custom_functions(uses.custom))
                run(model)
        except StyleChanged:
            continue
        if uses is not None:
            uses.written |= shadow.written
            uses.differentiates |= functions.differentiates or planner.differentiates
        return SettledForward(planner, shadow.reads, shadow.sized + shadow.measured)
    raise RuntimeError(f"no stable shards after {_MOST_PASSES} passes over the forward")
