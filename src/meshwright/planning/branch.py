"""The branches of a plan (planning/places.py) in a recorded forward, and whether they can run at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.calls.stage import STUB, StageProgram, crossings
from meshwright.errors import Findings, source_place
from meshwright.graph import Event, ModelGraph, spelled
from meshwright.names import few
from meshwright.plan import Plan
from meshwright.planning.followers import first_wait, followers, unaccompanied
from meshwright.planning.places import Branches, place_of
from meshwright.planning.rows import rows_apart
from meshwright.regions import Join, PlacesOfCalls, Regions, cross_places, find_regions, place_events
from meshwright.submesh import Submesh, Submeshes, trunk


def find_branches(
    model: nn.Module, plan: Plan, branches: Branches, graph: ModelGraph, findings: Findings
) -> tuple[Branches, list[str]]:
    """The plan's branches, completed from the recorded forward (regions, work, places of parameters), and notes for a person.

    Args:
        said: the branches that the plan names.
        graph: the recorded forward.
        findings: gets the problems: modules that are not called, branches that cannot run at the same time.
    """
    notes: list[str] = []
    check_streams(branches.streams, graph, findings)
    if not branches.places:
        return branches, notes
    tree = Submeshes(plan.mesh, (trunk(plan.mesh), *_divided(model, branches.places, graph)))
    followed = followers(graph, branches.placed, tree)
    placed = {**branches.placed, **{module: (branch,) for module, branch in followed.items()}}
    if followed:
        chosen = tuple(
            replace(p, modules=(*p.modules, *(m for m, branch in followed.items() if branch == number)))
            for number, p in enumerate(branches.places, 1)
        )
        tree = Submeshes(plan.mesh, (trunk(plan.mesh), *_divided(model, chosen, graph)))
        notes += [f"{module} runs on {tree[branch].on}: it takes only what that branch gives, and others would wait"
                  for module, branch in followed.items()]  # fmt: skip
    notes += _undivided(tree, hooked=bool(graph.hook_nodes))
    regions = find_regions(graph, placed, tree)
    _check_called(placed, tree, graph, findings)
    _check_reads(regions, placed, tree, graph, findings)
    _check_alone(regions, tree, graph, findings)
    _check_slots(placed, tree, graph, findings)
    _check_drawn(regions, tree, graph, findings)
    _check_sizes(regions, tree, graph, findings)
    _check_differentiated(regions, tree, graph, findings)
    homes = _homes(model, graph, regions, placed)
    shared = [name for name, places in homes.items() if len(places) > 1]
    if shared:
        notes.append(f"used in several places, held whole in each, gradients summed: {few(shared)}")
    with_work = tuple(replace(p, work=_work(i, tree, regions, graph)) for i, p in enumerate(tree.all[1:], 1))
    return Branches(with_work, placed, branches.streams, regions, homes), notes


def _divided(model: nn.Module, places: tuple[Submesh, ...], graph: ModelGraph) -> tuple[Submesh, ...]:
    """The places, with ``splits`` set: whether each data rank of a place runs only some of the rows."""
    around = {p.parent for p in places}
    return tuple(
        # (A node for backward hooks gives whole tensors.)
        replace(p, splits=p.data > 1 and number not in around and not graph.hook_nodes and rows_apart(model, p, graph))
        for number, p in enumerate(places, 1)
    )


def _undivided(places: Submeshes, *, hooked: bool) -> list[str]:
    """Notes on places with several data ranks of which each runs all rows. ``hooked``: whether modules have backward hooks."""
    notes, around = [], {p.parent for p in places.all}
    for number, place in enumerate(places.all):
        if number and place.data > 1 and not place.splits:
            why = (
                "the model has backward hooks of modules, which get whole gradients" if hooked
                else "what a row gives depends on others, or is not one result a row"
            )  # fmt: skip
            notes.append(
                f"{', '.join(place.modules[:3])} on {place.on}: {'it has branches within' if number in around else why}: "
                "each data rank of it runs all rows, which is right, and no faster"
            )
    return notes


def _work(branch: int, places: Submeshes, regions: Regions, graph: ModelGraph) -> int:
    """Sum of ``Event.work`` over the events of a branch and of the branches within it."""
    events = (e for e, at in zip(graph.events, regions.places, strict=True) if branch in places.chain(at))
    return sum(e.work for e in events)


def check_streams(streams: Mapping[str, int], graph: ModelGraph, findings: Findings) -> None:
    """Adds a finding for each block on a stream beside which no block of another stream can run.

    A block can run beside another if the other ends before anything uses a value that the first made.
    """
    calls = sorted((c for c in graph.calls.values() if c.module in streams), key=lambda c: c.start)
    beside: set[str] = set()
    for i, call in enumerate(calls):
        values = [n for p in range(call.start, call.stop) for n in graph.values_made_by(p)]
        uses_after = (p for n in values for p in graph.consumers.get(n, ()) if p >= call.stop)
        first_use = min(uses_after, default=len(graph.events))
        for other in calls[i + 1 :]:
            if other.stop <= first_use and streams[other.module] != streams[call.module]:
                beside |= {call.module, other.module}
    for name in sorted(set(streams) - beside):
        findings.add(
            where=f"modules.{name}.on",
            given=f"stream[{streams[name]}], and no block on another stream that could run at the same time",
            required="blocks on several streams that take nothing of each other, called one after the other",
            fix=f"leave out on: for {name}",
        )


def _check_called(
    placed: Mapping[str, tuple[int, ...]], places: Submeshes, graph: ModelGraph, findings: Findings
) -> None:
    calls = Counter(call.module for call in graph.calls.values())
    for name, turns in placed.items():
        if not calls[name]:
            findings.add(
                where=f"modules.{name}.on",
                given="a module whose forward the model does not call",
                required="modules that are called; for a container, the modules within it",
                fix=f"'{name}.*': {{on: '{places[turns[0]].on}'}}",
            )
        elif len(turns) > calls[name]:
            findings.add(
                where=f"modules.{name}.on",
                given=f"{len(turns)} places, for a module that is called {calls[name]} times",
                required="a place for each call",
                fix=f"on: [{', '.join(repr(places[p].on) for p in turns[: calls[name]])}]",
            )


def _check_reads(
    regions: Regions, placed: PlacesOfCalls, places: Submeshes, graph: ModelGraph, findings: Findings
) -> None:
    for position in ties_by_reads(regions, placed, places, graph):
        event, branch = graph.events[position], regions.places[position]
        why = "and a branch comes after it"
        if branch:
            why = f"which {places[branch].on} alone has, in a call that other ranks follow too"
        findings.add(
            where=f"modules.on, in {spelled(event.path)}",
            given=f"a value is read there ({event.function}, {event.line}), {why}",
            required="branches whose way does not depend on values",
            fix="leave out on: for the modules within that module",
        )


def ties_by_reads(regions: Regions, placed: PlacesOfCalls, places: Submeshes, graph: ModelGraph) -> list[int]:
    """The positions of events that read a value (``if x.any():``) where branches cannot be.

    After a read, the module's path may depend on the value, so no branch may follow in the same call. A value that a branch
    has is missing on other ranks: they must not follow the call that reads it (a stub of the call is fine).
    """
    ties = []
    elsewhere: dict[int, StageProgram] = {}  # branch → what ranks outside it do
    for i, event in enumerate(graph.events):
        call, branch = graph.calls.get(event.path), regions.places[i]
        if not event.reads or not event.inputs or call is None:
            continue
        if any(regions.places[p] != branch for p in range(i + 1, call.stop)):
            ties.append(i)
            continue
        if not branch:
            continue
        if branch not in elsewhere:
            others = frozenset(p for p in range(len(places)) if branch not in places.chain(p))
            elsewhere[branch] = StageProgram(graph, crossings(graph, ()), 0, placed, places, others)
        calls = [graph.calls[event.path[:depth]] for depth in range(1, len(event.path) + 1)]
        stubs = [c for c in calls if elsewhere[branch].treatments.get(c.path) == STUB]
        if not stubs or any(c.untold for c in stubs):
            ties.append(i)
    return ties


def _leave_out(place: Submesh) -> str:
    return f"leave out on: for {', '.join(place.modules[:3])}"


def _check_slots(placed: PlacesOfCalls, places: Submeshes, graph: ModelGraph, findings: Findings) -> None:
    """Adds a finding for each slot that a branch changes and other ranks would need, or that a checkpoint changes twice."""
    followed = graph.followed or graph

    def add(slots: Iterable[tuple[tuple[str, str], int, int]], given: str, required: str) -> None:
        for (module, name), branch, position in slots:
            where, line = f"{module}.{name}" if module else name, _where(followed.events[position])
            given_here = given.format(on=places[branch].on, line=line)
            findings.add(where=where, given=given_here, required=required, fix=_leave_out(places[branch]))

    add(
        slots_of_two_places(placed, places, graph),
        given="a buffer or attribute that a forward changes on {on}, and that is used elsewhere too ({line})",
        required="what a branch changes and keeps is used by that branch alone: other ranks have not changed theirs",
    )
    add(
        changed_in_checkpoints(placed, places, graph),
        given="a buffer or attribute that changes in a checkpoint around what runs on {on} ({line}): on one device it changes "
        "again in the recomputation",
        required="checkpoints around branches change nothing; or checkpoints within the branches",
    )


def _check_drawn(regions: Regions, places: Submeshes, graph: ModelGraph, findings: Findings) -> None:
    """Adds a finding for each ``torch.Generator`` of the model from which several places draw, if other ranks cannot draw the
    same count of numbers."""
    for generator, positions in graph.drawn_from.items():
        branch = next((regions.places[p] for p in positions if regions.places[p]), 0)
        if generator in graph.drawn_along or {regions.places[p] for p in positions} <= {branch}:
            continue
        event = next(graph.events[p] for p in positions if regions.places[p])
        findings.add(
            where=f"modules.on, in {_module(event.path)}",
            given=f"a draw on {places[branch].on} from a generator that other ranks draw from too ({_where(event)}), and how "
            "many numbers are drawn follows from values that they lack",
            required="a generator for each branch",
            fix=_leave_out(places[branch]),
        )


def _check_sizes(regions: Regions, places: Submeshes, graph: ModelGraph, findings: Findings) -> None:
    """Adds a finding for each value that crosses into a branch or out of it, if its size follows from values of the model:
    other ranks cannot know it."""
    reported: set[int] = set()
    for n, position in cross_places(graph, graph.sized_by_model, regions.places):
        source, event = (graph.events[p] for p in (graph.values[n].position, position))
        branch = regions.places[position] or regions.places[graph.values[n].position]
        if branch not in reported:
            reported.add(branch)
            findings.add(
                where=f"modules.{places[branch].modules[0]}.on",
                given=f"a tensor whose size follows from values of the model ({_where(source)}), taken in another place "
                f"({_where(event)})",
                required="tensors that cross into a branch or out of it have sizes that follow from the batch",
                fix=_leave_out(places[branch]),
            )


def _check_differentiated(regions: Regions, places: Submeshes, graph: ModelGraph, findings: Findings) -> None:
    """Adds a finding for each gradient that the forward asks for itself and that would flow from one place to another: what the
    branches take of the trunk are tensors of their own, and the graph of a join cannot be differentiated again."""
    for position in graph.differentiated:
        passed = {regions.places[p] for p in (*_differentiated_events(graph, position), position)}
        if len(passed) > 1:
            place = places[max(passed)]
            findings.add(
                where=f"modules.{place.modules[0]}.on",
                given=f"a gradient that the forward asks for itself ({_where(graph.events[position])}), and that flows out of "
                "this branch or into it",
                required="such a gradient flows through one branch, or through none",
                fix=_leave_out(place),
            )


def _differentiated_events(graph: ModelGraph, position: int) -> list[int]:
    """The positions of the events through which a gradient flows that the event at ``position`` asks for."""
    event, values = graph.events[position], graph.differentiated[position]
    names = {graph.values[n].name for n in values or ()}
    reached = {n for n, value in enumerate(graph.values) if value.name in names}
    parameters = {*event.parameters}
    of_all = values is None and not parameters
    after = []
    for p, before in enumerate(graph.events[:position]):
        if of_all or not reached.isdisjoint(before.inputs) or not parameters.isdisjoint(before.parameters):
            reached.update(graph.values_made_by(p))
            after.append(p)
    needed, passed = {*event.inputs}, []
    for p in reversed(after):
        if not needed.isdisjoint(graph.values_made_by(p)):
            needed.update(graph.events[p].inputs)
            passed.append(p)
    return passed


def changed_in_checkpoints(
    placed: PlacesOfCalls, places: Submeshes, graph: ModelGraph
) -> list[tuple[tuple[str, str], int, int]]:
    """The slots that change in a checkpoint of the model around a branch, one for each checkpoint.

    One device changes them twice, in the forward and in the recomputation. A rank that has only a part of what the
    checkpointed function takes does not recompute it.

    Returns:
        (slot, branch, position of the change), as of ``slots_of_two_places``.
    """
    followed, found = graph.followed or graph, []
    if not followed.segments or not followed.slot_uses:
        return []
    at = place_events(followed, placed, places)
    for (path, _), (start, stop) in followed.segments.items():
        branch = next((at[p] for p in range(start, stop) if at[p]), 0)
        if not branch or any(module in placed for module, _ in path):  # (a branch recomputes what is within it)
            continue
        changes = [(slot, p) for slot, (_, changed) in followed.slot_uses.items() for p in changed if start <= p < stop]
        found += [(slot, branch, position) for slot, position in changes[:1]]
    return found


def slots_of_two_places(
    placed: PlacesOfCalls, places: Submeshes, graph: ModelGraph
) -> list[tuple[tuple[str, str], int, int]]:
    """Slots (buffers and attributes of modules) that a branch changes, or uses before a change, and that another place uses.

    Returns:
        (slot, branch, position of a use elsewhere). The position counts events of ``graph.followed`` if there is one, else of
        ``graph``.
    """
    followed = graph.followed or graph
    if not followed.slot_uses:
        return []
    at, conflicts = place_events(followed, placed, places), []
    for slot, (used, changed) in followed.slot_uses.items():
        branch = next((at[p] for p in (*changed, *(used[:1] if graph.followed is None else ())) if at[p]), 0)
        elsewhere = [p for p in used if at[p] != branch]
        if branch and elsewhere:
            conflicts.append((slot, branch, elsewhere[0]))
    return conflicts


def _check_alone(regions: Regions, places: Submeshes, graph: ModelGraph, findings: Findings) -> None:
    """Adds a finding for branches that cannot run beside another: the value that makes one wait. Each value is named once."""
    reported: set[str] = set()
    for branch, join in unaccompanied(regions, places):
        place = places[branch]
        other = next(p for p in places.branches if places[p].parent == place.parent and p != branch)
        tie = _tie(regions, places, graph, join)
        if tie in reported:
            continue
        reported.add(tie)
        findings.add(
            where=f"modules.{place.modules[0]}.on",
            given=f"{place.on}, at the same time as {places[other].on}: {tie}",
            required="branches that use no value of each other between the fork and the join",
            fix=f"leave out on: for {place.modules[0]}",
        )


def _tie(regions: Regions, places: Submeshes, graph: ModelGraph, join: Join) -> str:
    """Text for the value that makes a branch run before or after the others."""
    waiting = first_wait(regions, places, graph, join)
    if waiting is None:
        return "they stand one after the other"
    event, value = graph.events[waiting[0]], graph.values[waiting[1]]
    source = graph.events[value.position]
    return (
        f"{_module(event.path)} ({_where(event)}) takes what {_module(source.path)} gives ({_where(source)}, "
        f"shape {value.shape}), and what comes after waits for it"
    )


def _where(event: Event) -> str:
    file, _, line = event.line.rpartition(":")
    return f"{event.function}, {source_place(file, int(line or 0))}"


def _module(path: Any) -> str:
    return next((name for name, _ in reversed(path) if name), "the model")


def _homes(
    model: nn.Module, graph: ModelGraph, regions: Regions, placed: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Parameter → the places that use it; for a parameter that this forward does not use, the places of its module."""
    homes: dict[str, tuple[int, ...]] = {}
    for name, _ in model.named_parameters():
        used = {regions.places[p] for p in graph.uses.get(name, ()) if not graph.events[p].hands_on}
        homes[name] = tuple(sorted(used)) or place_of(name, placed)
    return homes


def buffer_place(name: str, graph: ModelGraph, branches: Branches) -> int:
    """The place whose copy of a buffer counts: the place of the last event that uses it, or that of its module if none does."""
    if branches.regions is None:
        return 0
    for position in range(len(graph.events) - 1, -1, -1):
        if name in graph.events[position].buffers:
            return branches.regions.places[position]
    return place_of(name.rpartition(".")[0], branches.placed)[0]
