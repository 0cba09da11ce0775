"""Units: which modules FSDP2 gathers at once, innermost first and the root last.

They are chosen from repeated blocks and what the plan names. Then those go that FSDP2 could not gather and free at the right
time: its hooks stand at the beginning and the end of a unit's forward, and at the gradient of what that gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from meshwright.blame import is_ours
from meshwright.chance import WAYS, drawing
from meshwright.graph import Call, ModelGraph
from meshwright.names import few
from meshwright.plan import Entry
from meshwright.planning.draft import Draft
from meshwright.planning.kept import undisturbed
from meshwright.planning.known_shapes import Asked, KnownShapes
from meshwright.planning.pipeline import parted_modules
from meshwright.planning.places import place_of
from meshwright.planning.shadow import Shadow
from meshwright.planning.units import Uses, called_modules, repeated_blocks
from meshwright.recipe import Unit
from meshwright.submesh import Submeshes, trunk


def find_blocks(draft: Draft) -> Draft:
    """The layers of the model."""
    return replace(draft, blocks=repeated_blocks(draft.model))


def choose_units(draft: Draft) -> Draft:
    """The repeated blocks and what the plan names.

    A module that stands in a place of its own is a unit, as a unit lives on one mesh. What the plan says of a container
    that is never called is said of the modules in it.
    """
    modules, placed = dict(draft.model.named_modules()), draft.branches.placed
    chosen = {name: _following(unit, draft.entries) for name, unit in _named(draft, modules).items()}
    chosen |= {n: Unit(n) for n in placed if n and n not in chosen}
    held = [u for u in chosen.values() if any(True for _ in modules[u.name].parameters())]
    inner = (replace(u, place=place_of(u.name, placed)[0]) for u in sorted(held, key=lambda u: -u.name.count(".")))
    return replace(draft, units=(*inner, Unit("", draft.entry("").dp or "shard")))


def _named(draft: Draft, modules: Mapping[str, nn.Module]) -> dict[str, Unit]:
    """The blocks, and the modules of which the plan says something that holds for a unit."""
    chosen = {b: Unit(b) for b in draft.blocks if draft.entry(b).unit is not False}
    for name, entry in draft.entries.items():
        if name and name in modules and (entry.unit or entry.dp is not None or name in draft.branches.placed):
            called = called_modules(name, modules[name])
            chosen |= {n: Unit(n, entry.dp or "shard") for n in called if n == name or n not in chosen}
    return chosen


def _following(unit: Unit, entries: Mapping[str, Entry]) -> Unit:
    """A unit of whose data axes the plan says nothing follows the innermost module around it of which it does."""
    if entries.get(unit.name, Entry()).dp is not None:
        return unit
    above = [n for n, entry in entries.items() if entry.dp is not None and unit.name.startswith(n + ".")]
    return replace(unit, data=entries[max(above, key=len)].dp or unit.data) if above else unit


def close_units(draft: Draft) -> Draft:
    """Units whose parameters are used inside their own forward only, and which run on every rank.

    FSDP2 gathers a unit when its forward starts: a rank that skips it would leave the others waiting. And it frees what it
    gathered when a backward has gone through a unit, though the forward that asked for that backward may go on.
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
    why |= dict.fromkeys(sorted(_sometimes_skipped(draft, uses) - set(why)), "whether it runs depends on values")
    notes = [f"{unit} is no unit of its own: {reason}" for unit, reason in why.items()]
    units = [u for u in draft.units if u.name not in why]
    notes += _of_hidden(handed := {u.name: uses.escapes.handed[u.name] for u in units if u.name in uses.escapes.handed})
    units = [
        replace(
            u, follows_inputs=not (draft.routed or u.name in uses.escapes.entered), follows_outputs=u.name not in handed
        )
        for u in units
    ]
    return replace(draft, units=tuple(units)).noted(notes)


def _of_hidden(handed: Mapping[str, str]) -> list[str]:
    """A note for each line that uses what units made and did not return."""
    units: dict[str, list[str]] = {}
    for unit, line in handed.items():
        units.setdefault(line, []).append(unit)
    why = "uses what they made and did not return"
    return [f"gathered from forward to backward, as {line} {why}: {few(names)}" for line, names in units.items()]


def _sometimes_skipped(draft: Draft, uses: Uses) -> set[str]:
    """Units that a forward does not call when every question it asks of values is answered the other way, when masks select
    nothing, or when it draws other random numbers. They matter if data ranks may go different ways."""
    model, always, asked = draft.model, set(uses.called), Asked()
    if not draft.routed:
        return set()
    for contrary, way in ((True, None), *((False, way) for way in WAYS if draft.drawn)):
        with drawing(way, model):
            other, _ = _another(draft, uses, Shadow(contrary=contrary), asked)
        # The other answers need not make sense to the model. What it had not come to is taken to be skipped: a unit that a
        # rank skips would leave the others waiting.
        always &= other.called.keys()
    if draft.cuts is not None and not draft.cuts.selects and not draft.drawn:
        return set(uses.candidates) - always  # the forward selected nothing by masks: it would be the same again
    other, ended = _another(draft, uses, Shadow(empty=True), asked)
    # With nothing selected, a model that does not ask how much that is may make no sense: what it did not come to is none.
    order = [*uses.called]
    last = len(order) if ended else max((order.index(n) for n in other.called if n in uses.called), default=0)
    always -= set(order[:last]) - other.called.keys()
    return set(uses.candidates) - always


def _another(draft: Draft, uses: Uses, shadow: Shadow, asked: Asked) -> tuple[Uses, bool]:
    """The units that another forward calls, and whether it came to its end. ``asked``: what functions give."""
    other = Uses(draft.model, uses.candidates)
    try:
        with torch.no_grad(), shadow, KnownShapes(shadow, asked), other.watching():
            undisturbed(draft.model, draft.run)(draft.model)
    except Exception as error:
        if is_ours(error):
            raise
        return other, False
    return other, True


def keep_units_in_stages(draft: Draft) -> Draft:
    """Units without those that a cut between stages goes through."""
    if draft.graph is None or not draft.stages:
        return draft
    parted = parted_modules(draft.graph, draft.stages)
    names = (u.name for u in draft.units if u.name in parted)
    notes = (f"{name} is no unit of its own: a cut between stages goes through it" for name in names)
    return replace(draft, units=tuple(u for u in draft.units if u.name not in parted)).noted(notes)


def keep_units_in_branches(draft: Draft) -> Draft:
    """Units of which every rank that has them has what they give: FSDP2 gathers a unit for its backward when a gradient comes
    to its result, which it does not on a rank where that is made in another branch."""
    graph, regions, mesh = draft.graph, draft.branches.regions, draft.plan.mesh
    if graph is None or regions is None or draft.data == 1:
        return draft
    places, of_name = Submeshes(mesh, (trunk(mesh), *draft.branches.places)), {u.name: u for u in draft.units if u.name}
    parted: dict[str, None] = {}
    for call in graph.calls.values():
        unit = of_name.get(call.module)
        if unit is not None and any(
            regions.places[graph.values[n].position] not in places.chain(unit.place) for n in _given(graph, call)
        ):
            parted[unit.name] = None
    if not parted:
        return draft
    note = f"no units of their own, as what they give is made in a branch within: {few(parted)}"
    return replace(draft, units=tuple(u for u in draft.units if u.name not in parted)).noted([note])


def _given(graph: ModelGraph, call: Call) -> set[int]:
    """The values with a gradient that are made in a call and used after it."""
    made = {n for p in range(call.start, call.stop) for n in graph.made(p) if graph.values[n].requires_grad}
    return {n for n in made if n in call.outputs or any(p >= call.stop for p in graph.consumers.get(n, ()))}
