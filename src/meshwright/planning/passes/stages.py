"""Stages of the pipeline: where the program is cut, and which stages use each parameter and buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.calls.structure import buffer_places
from meshwright.errors import Finding, Findings
from meshwright.graph import ModelGraph
from meshwright.names import few
from meshwright.planning.branch import buffer_place
from meshwright.planning.draft import Draft, Names
from meshwright.planning.pipeline import (
    StageMemory,
    choose_cuts,
    cut_positions,
    make_stages,
    no_cuts,
    recomputed_spans,
    stage_of,
)

Pinned = Mapping[int, frozenset[int]]
"""Position of an event → the stages it may be on."""


def cut_into_stages(draft: Draft) -> Draft:
    """Adds the pipeline's stages, and for each parameter the stages that use it.

    Raises:
        PlanError: the program has no such cuts.
    """
    graph, ranks = draft.graph, draft.plan.mesh.axis_size("pp")
    if graph is None or ranks == 1:
        return replace(draft, homes=dict.fromkeys(draft.names.parameters, (0,)))
    count = ranks * (draft.plan.stages_per_rank or (2 if draft.plan.schedule == "interleaved" else 1))
    cuts = _cuts(draft, graph, count, _pinned(draft, graph, count))
    return replace(
        draft,
        stages=make_stages(graph, cuts, {name: p.shape for name, (p, _) in draft.names.parameters.items()}),
        homes=_homes(graph, cuts, draft.names),
    )


def _pinned(draft: Draft, graph: ModelGraph, count: int) -> Pinned:
    """Position of an event in a module that the plan places on a pp rank → the stages of that rank."""
    findings, pinned, ranks = Findings(), dict[int, frozenset[int]](), draft.plan.mesh.axis_size("pp")
    for name, entry in draft.entries.items():
        if entry.pp_rank is None:
            continue
        if entry.pp_rank >= ranks:
            findings.add(
                where=f"modules.{name}.on",
                given=f"pp[{entry.pp_rank}]",
                required=f"a rank of pp={ranks}, from 0 to {ranks - 1}",
                fix=f"on: pp[{ranks - 1}]",
            )
            continue
        stages = frozenset(range(entry.pp_rank, count, ranks))
        for call in graph.calls.values():
            if call.module == name:
                pinned |= {p: pinned.get(p, stages) & stages for p in range(call.start, call.stop)}
    findings.raise_if_any()
    return pinned


def _cuts(draft: Draft, graph: ModelGraph, count: int, pinned: Pinned) -> list[int]:
    """The positions at which stages 1, 2 … begin: between blocks, or anywhere if these are too few."""
    regions, memory = draft.branches.regions, _memory(draft, graph, count)
    spans = regions.spans if regions is not None else ()
    for of_batch in sorted({False, *(span.of_batch for span in graph.spans)}):
        allowed = cut_positions(graph, draft.blocks, spans, of_batch=of_batch)
        for positions in (allowed.between_blocks, allowed.anywhere):
            cuts = choose_cuts(graph, positions, memory, pinned)
            if cuts is not None:
                graph.of_this_batch |= of_batch
                return cuts
    findings = Findings()
    no_cuts(findings, graph, allowed, count, draft.plan.mesh.axis_size("pp"), bool(pinned))
    raise findings.error()


def _memory(draft: Draft, graph: ModelGraph, count: int) -> StageMemory:
    """What ``count`` stages have in memory."""
    nbytes = {name: p.numel() * p.element_size() for name, (p, _) in draft.names.parameters.items()}
    recomputed = recomputed_spans(graph, draft.recompute)
    return StageMemory.of(
        draft.plan.mesh, draft.plan.schedule, count, draft.microbatches, nbytes, recomputed, pieces=draft.pieces
    )


def _homes(graph: ModelGraph, cuts: Sequence[int], names: Names) -> dict[str, tuple[int, ...]]:
    """Parameter → the stages that use it; for a parameter that this forward does not use, the stages of its module."""
    used = {name: tuple(sorted({stage_of(cuts, p) for p in positions})) for name, positions in graph.uses.items()}
    for event in graph.events:
        if event.reads and not event.inputs:
            used |= dict.fromkeys(event.parameters, tuple(range(len(cuts) + 1)))
    running = _running(graph, cuts)
    return {**used, **{name: _beside(name, graph, running) for name in names.parameters if name not in used}}


def _running(graph: ModelGraph, cuts: Sequence[int]) -> dict[str, set[int]]:
    """Module → the stages on which it runs."""
    running: dict[str, set[int]] = {}
    for call in graph.calls.values():
        # If values of the batch decide the path, another batch may use a parameter on any stage of its module.
        last = max(call.start, call.stop - 1) if graph.of_this_batch else call.start
        running.setdefault(call.module, set()).update(range(stage_of(cuts, call.start), stage_of(cuts, last) + 1))
    for event in graph.events:  # a module that reads a value runs on the stage of the read
        if event.reads and event.inputs:
            module = event.path[-1][0] if event.path else ""
            running[module] = {stage_of(cuts, graph.positions[event.path, event.index])}
    return running


def _beside(name: str, graph: ModelGraph, running: Mapping[str, set[int]]) -> tuple[int, ...]:
    """The stages of a parameter that the forward does not use: those of the innermost module around it that runs."""
    scopes = [name[:i] for i, c in enumerate(name) if c == "."]
    scope = next((s for s in (*reversed(scopes), "") if s in running), None)
    if scope is None:
        return (0,)
    return tuple(sorted(running[scope])) if scope or graph.of_this_batch else (min(running[scope]),)


def choose_schedule(draft: Draft) -> Draft:
    """Adds the schedule: the plan's; 1F1B instead of zero bubble if the forward takes gradients itself; 1F1B (then F, B)
    without a pipeline."""
    if not draft.stages:
        return _without_pipeline(draft)
    inner = [e for e in draft.graph.events if e.function in ("grad", "backward")] if draft.graph is not None else []
    if draft.plan.schedule != "zero_bubble" or not inner:
        return replace(draft, schedule=draft.plan.schedule)
    why = f"the forward takes gradients itself ({inner[0].line}), which cannot wait"
    return replace(draft, schedule="1f1b").noted([f"schedule: 1f1b, not zero_bubble: {why}"])


def _without_pipeline(draft: Draft) -> Draft:
    """The draft with schedule 1F1B, and a note if the plan has settings for a pipeline. They are no problem: the plan may
    be used with another mesh."""
    plan, mesh = draft.plan, draft.plan.mesh
    settings = [f"schedule: {plan.schedule}"] if plan.schedule != "1f1b" else []
    settings += [f"stages_per_rank: {plan.stages_per_rank}"] if plan.stages_per_rank is not None else []
    note = f"{' and '.join(settings)}: without effect, as the mesh {mesh} has no pipeline (pp of at least 2)"
    return replace(draft, schedule="1f1b").noted([note] if settings else [])


def tell_shared(draft: Draft) -> Draft:
    """A note on the parameters that several stages hold."""
    names = [name for name, stages in draft.homes.items() if len(stages) > 1]
    if not names:
        return draft
    return draft.noted([f"held by several stages, their gradients summed: {few(names)}"])


def check_shared(draft: Draft) -> Draft:
    """A problem for each parameter of a branch that several stages use: stages that share a parameter need it on the same
    ranks."""
    shared = (name for name, stages in draft.homes.items() if len(stages) > 1 and draft.branches.home(name) != (0,))
    return draft.wrong(
        Finding(
            where=f"the model's {name}",
            given="a parameter of a branch that several stages of the pipeline use",
            required="parameters of branches that one stage uses",
            fix="leave out on: for the module that uses it",
        )
        for name in shared
    )


def place_buffers(draft: Draft) -> Draft:
    """Adds for each buffer the stage and place whose copy counts: the stage that changes the buffer; else the last that
    uses it; else the first that runs its module."""
    graph, branches = draft.graph, draft.branches
    if graph is None:
        return draft
    cuts = [graph.positions[s.first] for s in draft.stages[1:]]
    stages = {name: stage_of(cuts, p) for p, event in enumerate(graph.events) for name in event.buffers}
    stages |= {f"{m}.{n}" if m else n: stage_of(cuts, p) for (m, n), p in graph.changes.items()}
    runs: dict[str, int] = {}
    for call in graph.calls.values():
        runs.setdefault(call.module, stage_of(cuts, call.start))
    buffers = (
        (name, stages.get(name, runs.get(name.rpartition(".")[0], 0)), buffer_place(name, graph, branches))
        for name in buffer_places(draft.model)
    )
    return replace(draft, buffers=tuple(buffers))
