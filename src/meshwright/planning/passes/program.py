"""The forward as a program: recorded if stages or branches each run a part of it."""

from __future__ import annotations

from dataclasses import replace

from meshwright.chance import WAYS, drawing
from meshwright.errors import Finding, PlanError
from meshwright.graph import ModelGraph
from meshwright.planning.capture import capture, computing_in
from meshwright.planning.draft import Draft
from meshwright.planning.module_state import undisturbed
from meshwright.planning.rows import events_by_rows


def record_forward(draft: Draft) -> Draft:
    """Records the forward if there are stages or branches. If random numbers decide which functions it calls, adds a
    problem."""
    if not draft.branches and draft.plan.mesh.axis_size("pp") == 1:
        return draft
    graph = recorded(draft)
    for way in WAYS if graph.draws else ():
        with drawing(way, draft.model):
            try:
                other = recorded(draft)
            except PlanError:  # the forward cannot be followed with these numbers
                other = ModelGraph()
        if other.signature != graph.signature:
            return replace(draft, graph=graph).wrong([_decided_by_chance(graph, other)])
    return replace(draft, graph=graph)


def recorded(draft: Draft) -> ModelGraph:
    """The forward on the sample batch, recorded. If a branch has data ranks, also finds the functions of which each data
    rank can run only its own rows (``by_rows``)."""
    model, plan = draft.model, draft.plan
    with computing_in(model, plan.precision):
        graph = capture(model, draft.run, staged=plan.mesh.axis_size("pp") > 1, follow=True)
        if not any(p.data > 1 for p in draft.branches.places):
            return graph
        return replace(graph, by_rows=events_by_rows(model, undisturbed(model, draft.run), graph))


def _decided_by_chance(graph: ModelGraph, other: ModelGraph) -> Finding:
    """The problem that random numbers decide the forward's path, with the line where two recordings begin to differ."""
    pairs = zip(graph.events, other.events, strict=False)
    line = next((a.line for a, b in pairs if (a.path, a.function) != (b.path, b.function)), "")
    return Finding(
        where="the model's forward",
        given="random numbers of Python's or NumPy's decide what it computes"
        + (f": with others it does not come to {line} next" if line else ""),
        required="for a pipeline or branches, a forward that calls the same functions in every step",
        fix="mesh: {dp_shard: 2}",
    )
