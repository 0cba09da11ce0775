"""Which modules are recomputed: their activations are not kept, but computed again in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.graph import Call, ModelGraph
from meshwright.planning.draft import Draft
from meshwright.planning.pipeline import parted_modules, stage_of
from meshwright.planning.units import called_modules


def choose_recompute(draft: Draft) -> Draft:
    """The modules that the plan says to recompute; for a container that is never called, the modules within it."""
    modules, every = dict(draft.model.named_modules()), draft.plan.recompute == "blocks"
    blocks = [b for b in draft.blocks if every and draft.entry(b).recompute != "none"]
    named = [
        inner for name, entry in draft.entries.items() if name in modules and entry.recompute == "block"
        for inner in (called_modules(name, modules[name]) if name else ())
    ]  # fmt: skip
    return replace(draft, recompute=tuple(dict.fromkeys([*blocks, *named])))


def keep_changed_later(draft: Draft) -> Draft:
    """Drops modules that a recomputation would give other tensors: modules whose input is written in place after their forward,
    modules whose parameters the model replaces for the time of a forward (``torch.func.functional_call``), and modules whose
    forward writes to parameters (a mean teacher's, for example), which would be written twice."""
    if draft.uses is None:
        if not draft.written:
            return draft
        unknown = [f"{r} keeps its activations: the forward writes to parameters" for r in draft.recompute]
        return replace(draft, recompute=()).noted(unknown)
    swapped = draft.uses.swapped_when_recomputed
    why = {r: f"its forward runs with another tensor in the place of {name}" for r, name in swapped.items()}
    why |= dict.fromkeys(sorted(draft.uses.writing), "its forward writes to parameters")
    why |= dict.fromkeys(draft.uses.rewritten, "its input is written to after its forward")
    notes = (f"{r} keeps its activations: {why[r]}" for r in draft.recompute if r in why)
    return replace(draft, recompute=tuple(r for r in draft.recompute if r not in why)).noted(notes)


def recompute_in_stages(draft: Draft) -> Draft:
    """Drops modules through which a cut goes, and modules whose calls a stage must follow because of what they change outside
    themselves: a recomputation is not followed."""
    if draft.graph is None or not draft.stages:
        return draft
    graph = draft.graph
    cuts = [graph.positions[s.first] for s in draft.stages[1:]]
    followed = {c.module: "its stage follows what it changes outside" for c in graph.calls.values() if c.visible}
    followed |= {
        c.module: "it takes what an earlier stage changes"
        for c in graph.calls.values()
        if _changed_before(graph, c, cuts)
    }
    notes = (f"{r} is not recomputed: {followed[r]}" for r in draft.recompute if r in followed)
    not_recomputed = followed.keys() | parted_modules(graph, draft.stages)
    return replace(draft, recompute=tuple(r for r in draft.recompute if r not in not_recomputed)).noted(notes)


def _changed_before(graph: ModelGraph, call: Call, cuts: Sequence[int]) -> bool:
    """Whether a call uses a value in memory that every stage has and that an earlier stage has changed: a buffer of another
    module, for example, whose contents this stage receives for its forward."""
    stage = stage_of(cuts, call.start)
    for event in graph.events[call.start : call.stop]:
        for value in (graph.values[n] for n in event.inputs):
            from_outside = value.position < call.start and value.storage in graph.outlasting
            if from_outside and stage_of(cuts, value.position) < stage:
                return True
    return False


def recompute_in_branches(draft: Draft) -> Draft:
    """Drops modules in which branches part or join, modules that use a parameter of several places, and modules of a branch
    that write to a container or object among their arguments: such calls are traced."""
    graph, branches = draft.graph, draft.branches
    if graph is None or branches.regions is None:
        return draft
    shared = {name for name in draft.names.parameters if len(branches.home(name)) > 1}
    parted = {
        c.module for c in graph.calls.values()
        if len(set(branches.regions.places[c.start : c.stop])) > 1
        or any(shared & set(e.parameters) for e in graph.events[c.start : c.stop])
    }  # fmt: skip
    why = {
        c.module: "it writes to an argument, in a branch"
        for c in graph.calls.values()
        if c.changes and any(branches.regions.places[c.start : c.stop])
    } | dict.fromkeys(parted, "branches part or meet in it")
    notes = (f"{r} keeps its activations: {why[r]}" for r in draft.recompute if r in why)
    return replace(draft, recompute=tuple(r for r in draft.recompute if r not in why)).noted(notes)
