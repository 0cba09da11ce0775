"""Which parameters are sharded over ``tp``, and how: found by running the model's own forward on meta tensors.

    a linear that meets a whole input is sharded by column; one that meets a sharded input is sharded by row

The forward runs through the very rules of a real run. Whatever the cut of a parameter leads to is followed (every cut
tensor knows the parameters its cut comes from), and what does not fit teaches a constraint about those parameters:

    a split, chunk or unbind finds k blocks in the sharded dim        cut each block (a fused QKV)
    a view finds heads in the sharded dim                             do not break a head
    the cut is gathered again (a function without a rule …)       not worth it: leave the parameter whole

Then the forward runs again, until nothing new is learnt. Constraints hold for a family: the same parameter of every
repeated block (planning/families.py).

The plan's word is obeyed whatever the forward makes of it: a cut that does not fit is gathered where it is used. Where
it says column or row of a parameter that no product takes as it is (``weight_norm``, ``scale * weight``), the dims are
tried, for the one whose cut a product first meets in that part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.planning.cuts import Cuts, Style, dims_of_style
from meshwright.planning.families import families
from meshwright.planning.known_shapes import Asked, KnownShapes
from meshwright.planning.planner import Decisions, Learnt, Planner, Reading
from meshwright.planning.shadow import Shadow
from meshwright.planning.units import Uses
from meshwright.private import storage_of
from meshwright.spmd.autograd_functions import custom_functions
from meshwright.spmd.comm import Ledger, PlannedAxis
from meshwright.spmd.dispatcher import Dispatcher


def infer_cuts(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    *,
    axis: str,
    size: int,
    styles: Mapping[str, Style],
    names: Mapping[int, str],
    seeds: Callable[[Dispatcher], Any] | None = None,
    uses: Uses | None = None,
) -> Cuts:
    """Finds the cuts of ``model`` (parameters on meta) over an axis of ``size`` ranks.

    Args:
        run: runs the forward, given the model.
        styles: parameter name → what the plan says of it.
        names: ``id(parameter)`` → name.
        seeds: a context manager that cuts block inputs over the sequence, given the dispatcher.
    """

    of = families(model, names.values())

    def follow(styles: Mapping[str, Style]) -> Followed:
        return _followed(model, run, axis, size, styles, names, of, seeds, uses)

    followed = follow(styles)
    dims = {names[id(p)]: p.dim() for p in model.parameters() if id(p) in names}
    for group in _unheeded(followed.planner, dims):
        kind, said = styles[group[0]].kind, styles
        tried = {}
        for dim in dims_of_style(kind, dims[group[0]]):
            styles = {**said, **{name: replace(said[name], kind="shard", dim=dim) for name in group}}
            tried[dim] = styles, follow(styles)
            if kind in tried[dim][1].planner.roles.get(group[0], [kind]):  # where no product met it, the first will do
                break
        else:
            dim = next(iter(tried))
        styles, followed = tried[dim]
    planner = followed.planner
    ledger = planner.dispatcher.ledger
    return Cuts(planner.layouts, planner.reasons(), ledger, followed.reads, planner.refused, followed.selects)


def _unheeded(planner: Planner, dims: Mapping[str, int]) -> list[list[str]]:
    """The parameters that the plan wants sharded by column or row, and that are whole: by family. Vectors follow weights."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, style in planner.styles.items():
        if style.forced and style.kind in ("column", "row") and name not in planner.layouts and dims.get(name, 0) > 1:
            groups.setdefault((planner.families.get(name, name), style.kind), []).append(name)
    return list(groups.values())


@dataclass(frozen=True)
class Followed:
    """A forward that was followed to its end, with nothing new learnt.

    Attributes:
        reads: how many values were read; ``selects``: how many sizes follow from values.
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
    uses: Uses | None,
    passes: int = 400,
) -> Followed:
    learnt: dict[str, Style] = {}
    news: dict[str, int] = {}
    asked, decisions = Asked(), Decisions()  # what a call gives, and what is decided on it, is the same in each pass
    rows = max((p.numel() for p in model.parameters()), default=0) // 8
    for _ in range(passes):
        planner = Planner(PlannedAxis(axis, size, 0, Ledger()), names, styles, learnt, news, rows, model)
        planner.take(decisions)
        planner.families = families
        mode, shadow = Reading(planner), Shadow(watch=uses.escapes.op if uses is not None else None)
        meeting = KnownShapes(shadow, asked)
        shadow.memory = planner.memory = {storage_of(p): names[id(p)] for p in model.parameters() if p.is_meta}
        try:
            with ExitStack() as stack:
                for context in (torch.no_grad(), shadow, meeting, mode.on()):
                    stack.enter_context(context)
                if seeds is not None:
                    stack.enter_context(seeds(planner.dispatcher))
                if uses is not None:
                    planner.uses = uses
                    stack.enter_context(uses.watching())
                    stack.enter_context(uses.escapes.watching())
                    stack.enter_context(custom_functions(uses.custom))
                run(model)
        except Learnt:
            continue
        if uses is not None:
            uses.written |= shadow.written
            uses.differentiates |= meeting.differentiates or planner.differentiates
        return Followed(planner, shadow.reads, shadow.sized + shadow.measured)
    raise RuntimeError(f"no stable cuts after {passes} passes over the forward")
