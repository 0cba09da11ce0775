"""Units: the modules that FSDP2 gathers at once, innermost first and the root last.

Candidates are the repeated blocks and the modules that the plan names. Then those are dropped that FSDP2 could not gather and
free at the right time: its hooks run at the beginning and the end of a unit's forward, and at the gradient of the unit's
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from inspect import getattr_static

import torch
from torch import nn

from meshwright.blame import is_of_model, is_ours
from meshwright.chance import WAYS, drawing
from meshwright.evaluation import in_evaluation
from meshwright.graph import Call, ModelGraph
from meshwright.names import few
from meshwright.plan import Entry
from meshwright.planning.draft import Draft
from meshwright.planning.known_shapes import KnownShapes, ShapeEntries
from meshwright.planning.module_state import undisturbed
from meshwright.planning.pipeline import parted_modules
from meshwright.planning.places import place_of
from meshwright.planning.shadow import Shadow
from meshwright.planning.units import ParameterUses, UsesNoted, called_modules, repeated_blocks
from meshwright.recipe import Unit
from meshwright.submesh import Submeshes, trunk


def find_blocks(draft: Draft) -> Draft:
    """Adds the repeated blocks of the model."""
    return replace(draft, blocks=repeated_blocks(draft.model))


def choose_units(draft: Draft) -> Draft:
    """Adds the candidates for units: the repeated blocks and the modules that the plan names.

    A module with a place of its own is a unit, because the parameters of a unit are all on one mesh. Settings for a container
    that is never called hold for the modules within it.
    """
    modules, placed = dict(draft.model.named_modules()), draft.branches.placed
    chosen = {name: _following(unit, draft.entries) for name, unit in _named(draft, modules).items()}
    chosen |= {n: Unit(n) for n in placed if n and n not in chosen}
    with_parameters = [u for u in chosen.values() if any(True for _ in modules[u.name].parameters())]
    innermost_first = sorted(with_parameters, key=lambda u: -u.name.count("."))
    inner = (replace(u, place=place_of(u.name, placed)[0]) for u in innermost_first)
    return replace(draft, units=(*inner, Unit("", draft.entry("").dp or "shard")))


def _named(draft: Draft, modules: Mapping[str, nn.Module]) -> dict[str, Unit]:
    """The blocks, and the modules for which the plan has a setting of units (``unit:``, ``dp:`` or a place)."""
    chosen = {b: Unit(b) for b in draft.blocks if draft.entry(b).unit is not False}
    for name, entry in draft.entries.items():
        if name and name in modules and (entry.unit or entry.dp is not None or name in draft.branches.placed):
            called = called_modules(name, modules[name])
            chosen |= {n: Unit(n, entry.dp or "shard") for n in called if n == name or n not in chosen}
    return chosen


def _following(unit: Unit, entries: Mapping[str, Entry]) -> Unit:
    """A unit without a ``dp:`` setting of its own gets that of the innermost module around it that has one."""
    if entries.get(unit.name, Entry()).dp is not None:
        return unit
    above = [n for n, entry in entries.items() if entry.dp is not None and unit.name.startswith(n + ".")]
    return replace(unit, data=entries[max(above, key=len)].dp or unit.data) if above else unit


def close_units(draft: Draft) -> Draft:
    """Drops units whose parameters are used outside their own forward, and units that some rank may skip.

    FSDP2 gathers a unit when its forward starts, so other ranks would wait for a rank that skips the unit. And it frees the
    gathered parameters after a backward through the unit, even if the forward itself asked for that backward and goes on.
    """
    uses = draft.uses
    if uses is None:
        return draft
    if uses.differentiates and len(draft.units) > 1:
        note = "the forward asks for gradients itself: the root is the only unit, gathered for the time of a step"
        return replace(draft, units=tuple(u for u in draft.units if not u.name)).noted([note])
    why = {u: f"{name} is used outside its forward" for u, name in sorted(uses.outside)}
    again = "is used within a custom autograd.Function, whose backward may compute with it again"
    why |= {u: f"{name} {again}" for u, name in sorted(uses.again) if u not in why}
    why |= {u: f"its forward runs with another tensor in the place of {name}" for u, name in uses.swapped.items()}
    evaluated = _outside_in_evaluation(draft, uses)
    why |= {u: f"{name} is used outside its forward in evaluation" for u, name in evaluated.items() if u not in why}
    why |= dict.fromkeys(sorted(_sometimes_skipped(draft, uses) - set(why)), "whether it runs depends on values")
    notes = [f"{unit} is no unit of its own: {reason}" for unit, reason in why.items()]
    units = [u for u in draft.units if u.name not in why]
    escapes = uses.escapes
    handed = {u.name: escapes.handed[u.name] for u in units if u.name in escapes.handed}
    notes += _of_hidden(handed)
    follow_inputs = {u.name for u in units if not draft.routed and u.name not in escapes.entered}
    units = [replace(u, follows_inputs=u.name in follow_inputs, follows_outputs=u.name not in handed) for u in units]
    return replace(draft, units=tuple(units)).noted(notes)


def _of_hidden(handed: Mapping[str, str]) -> list[str]:
    """A note for each source line that uses tensors that units made and did not return. ``handed``: unit → line."""
    units: dict[str, list[str]] = {}
    for unit, line in handed.items():
        units.setdefault(line, []).append(unit)
    why = "uses what they made and did not return"
    return [f"gathered from forward to backward, as {line} {why}: {few(names)}" for line, names in units.items()]


def _outside_in_evaluation(draft: Draft, uses: ParameterUses) -> dict[str, str]:
    """Unit → a parameter that the model uses outside the unit's forward if its modules are in evaluation mode."""
    if (
        draft.data == 1
        or len(draft.units) == 1
        or not any(map(_asks_for_mode, {type(m) for m in draft.model.modules()}))
    ):
        return {}
    with in_evaluation(draft.model, {name for name, _ in draft.model.named_modules()}):
        other, _ = _other_forward(draft, uses, Shadow(), ShapeEntries(), noted=True)
    return dict(sorted(other.outside))


def _asks_for_mode(kind: type[nn.Module]) -> bool:
    """Whether the forward of modules of the model's own depends on their mode (``self.training``)."""
    code = getattr(getattr_static(kind, "forward"), "__code__", None)  # a scripted module's is a descriptor
    return code is not None and is_of_model(code.co_filename) and "training" in code.co_names


def _sometimes_skipped(draft: Draft, uses: ParameterUses) -> set[str]:
    """Units that some forward does not call: if every read of a value gets the opposite answer, if masks select nothing,
    or with other random numbers. Empty if data ranks cannot take different paths."""
    model, always, asked = draft.model, set(uses.called), ShapeEntries()
    if not draft.routed:
        return set()
    for contrary, way in ((True, None), *((False, way) for way in WAYS if draft.drawn)):
        with drawing(way, model):
            other, _ = _other_forward(draft, uses, Shadow(contrary=contrary), asked)
        # The model may fail with the other answers. Units that it had not reached count as skipped, to be safe: if a rank skips
        # a unit, the others wait.
        always &= other.called.keys()
    if draft.shards is not None and not draft.shards.selects and not draft.drawn:
        # The forward has no masks that select: with empty masks it would be the same.
        return set(uses.candidates) - always
    other, ended = _other_forward(draft, uses, Shadow(empty=True), asked)
    # The model may also fail on empty selections if it does not check for them. Then only units before the last one that it
    # reached can count as skipped.
    order = [*uses.called]
    last = len(order) if ended else max((order.index(n) for n in other.called if n in uses.called), default=0)
    always -= set(order[:last]) - other.called.keys()
    return set(uses.candidates) - always


def _other_forward(
    draft: Draft, uses: ParameterUses, shadow: Shadow, asked: ShapeEntries, *, noted: bool = False
) -> tuple[ParameterUses, bool]:
    """(the uses of a forward under ``shadow``, whether it ran to its end).

    Args:
        asked: a cache of results on meta.
        noted: whether the functions that get a parameter are noted too, not only the modules that are called.
    """
    other = ParameterUses(draft.model, uses.candidates)
    noting = UsesNoted(draft.model, other) if noted else nullcontext()
    try:
        with torch.no_grad(), shadow, KnownShapes(shadow, asked), other.watching(), noting:
            undisturbed(draft.model, draft.run)(draft.model)
    except Exception as error:
        if is_ours(error):
            raise
        return other, False
    return other, True


def keep_units_in_stages(draft: Draft) -> Draft:
    """Drops units through which a cut between stages goes."""
    if draft.graph is None or not draft.stages:
        return draft
    parted = parted_modules(draft.graph, draft.stages)
    names = (u.name for u in draft.units if u.name in parted)
    notes = (f"{name} is no unit of its own: a cut between stages goes through it" for name in names)
    return replace(draft, units=tuple(u for u in draft.units if u.name not in parted)).noted(notes)


def keep_units_in_branches(draft: Draft) -> Draft:
    """Drops units whose results are made in a branch within them.

    FSDP2 gathers a unit for its backward when a gradient reaches the unit's result. No gradient reaches it on a rank that
    is not in that branch.
    """
    graph, regions, mesh = draft.graph, draft.branches.regions, draft.plan.mesh
    if graph is None or regions is None or draft.data == 1:
        return draft
    places, of_name = Submeshes(mesh, (trunk(mesh), *draft.branches.places)), {u.name: u for u in draft.units if u.name}
    parted: dict[str, None] = {}
    for call in graph.calls.values():
        unit = of_name.get(call.module)
        if unit is None:
            continue
        homes = {regions.places[graph.values[n].position] for n in _results(graph, call)}
        if not homes <= set(places.chain(unit.place)):
            parted[unit.name] = None
    if not parted:
        return draft
    note = f"no units of their own, as what they give is made in a branch within: {few(parted)}"
    return replace(draft, units=tuple(u for u in draft.units if u.name not in parted)).noted([note])


def _results(graph: ModelGraph, call: Call) -> set[int]:
    """The values with a gradient that a call makes and that are returned or used after it."""
    values = {n for p in range(call.start, call.stop) for n in graph.values_made_by(p) if graph.values[n].requires_grad}
    return {n for n in values if n in call.outputs or any(p >= call.stop for p in graph.consumers.get(n, ()))}
