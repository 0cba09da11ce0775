"""Finds, in the recorded forward, which modules could run at the same time.

The calls of modules within one call form a dependency graph: a call depends on another if it uses a value that was computed
from the other's results. Calls that do not depend on each other are put into one set, also if they are linked only through
further calls. All calls of one set come before all calls of the next. Within a set, calls that depend on each other form a
branch.
(Series and parallel parts of an order: Valdes, Tarjan, Lawler, SIAM J. Comput. 11(2), 1982.)

    stem ─┬─ reduce3 ── conv3 ─┬─ head          sets: {stem}, {the five}, {head}
          ├─ one ──────────────┤                branches: {reduce3, conv3}, {one}, {pool, project}
          └─ pool ── project ──┘

    left.0 ─┬─ left.1 ─┬─                       sets: {left.0, right.0}, {left.1, right.1}
    right.0 ┴─ right.1 ┴─                       branches: each by itself

If only one of the two lists uses results of the other, all four calls form one set in which all are linked. Then each list of
blocks is a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.graph import ROOT, Call, ModelGraph, Path
from meshwright.mesh import Mesh
from meshwright.names import pattern
from meshwright.plan import Entry, Plan
from meshwright.planning.branch import changed_in_checkpoints, slots_of_two_places, ties_by_reads
from meshwright.planning.split import best_split
from meshwright.regions import find_regions
from meshwright.submesh import Submesh, Submeshes, read_slice, trunk

Pattern = tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """A possible branch: the modules that it calls in order, the positions of their events, and its work in operations."""

    modules: tuple[str, ...]
    positions: tuple[int, ...]
    work: int


_Placed = list[tuple[Candidate, str]]  # the branches of a region, each with its slice of tp


def concurrent(graph: ModelGraph, within: str = "") -> list[tuple[Candidate, ...]]:
    """Sets of branches that could run at the same time, in the order of the forward. No set lies within another.

    A set counts only if one of its branches has several calls with parameters. Else (q, k and v of attention) tensor
    parallelism shards all of them without a collective, and branches would gain nothing.

    Args:
        within: search only the calls of this module.
    """
    children: dict[Path, list[Call]] = {}
    for call in graph.calls.values():
        if call.start < call.stop and len(call.path) > 1:
            children.setdefault(call.path[:-1], []).append(call)
    sets: list[tuple[Candidate, ...]] = []

    def look(path: Path) -> None:
        calls = sorted(children.get(path, []), key=lambda c: c.start)
        regions = [
            r for r in _regions(graph, graph.calls[path], calls)
            if len(r) > 1 and any(_weights(graph, branch) > 1 for branch in r)
        ]  # fmt: skip
        paths_in_regions = {c.path for region in regions for branch in region for c in branch}
        sets.extend(tuple(_candidate(graph, branch) for branch in region) for region in regions)
        for call in calls:
            if call.path not in paths_in_regions:
                look(call.path)

    for root in [ROOT] if not within else [c.path for c in graph.calls.values() if c.module == within]:
        look(root)
    return sets


def _weights(graph: ModelGraph, calls: Sequence[Call]) -> int:
    """How many calls within ``calls`` have events that use parameters."""
    return len({e.path for c in calls for e in graph.events[c.start : c.stop] if e.parameters})


def _candidate(graph: ModelGraph, calls: Sequence[Call]) -> Candidate:
    positions = tuple(p for c in calls for p in range(c.start, c.stop))
    return Candidate(tuple(c.module for c in calls), positions, sum(graph.events[p].work for p in positions))


def _regions(graph: ModelGraph, around: Call, calls: Sequence[Call]) -> Iterator[list[list[Call]]]:
    """The calls within one call, in sets (see the head of this file); each set is a list of branches."""
    before = _dependencies(graph, around, calls)

    def ordered(i: int, j: int) -> bool:
        return j in before[i] or i in before[j]

    for members in _joined(range(len(calls)), lambda i, j: not ordered(i, j)):
        branches = _joined(members, ordered)
        if len(branches) == 1:
            branches = _tracks(members, ordered, [pattern(c.module) for c in calls])
        yield [[calls[i] for i in branch] for branch in branches]


def _tracks(members: list[int], ordered: Callable[[int, int], bool], patterns: Sequence[Pattern]) -> list[list[int]]:
    """Branches among calls that are all linked: one branch for each list of blocks, if the lists run side by side.

    Returns:
        One branch with all calls if calls with the same name pattern do not all depend on each other.
    """
    lists: dict[Pattern, list[int]] = {}
    for i in members:
        lists.setdefault(patterns[i], []).append(i)
    blocks = list(lists.values())
    if not all(ordered(i, j) for block in blocks for i, j in combinations(block, 2)):
        return [members]
    sets = _joined(range(len(blocks)), lambda a, b: all(ordered(i, j) for i in blocks[a] for j in blocks[b]))
    return sorted(sorted(i for a in group for i in blocks[a]) for group in sets)


def _joined(members: Iterable[int], tied: Callable[[int, int], bool]) -> list[list[int]]:
    """The connected components of ``members`` under the relation ``tied``, sorted."""
    groups: list[list[int]] = []
    for i in members:
        joined = [group for group in groups if any(tied(i, j) for j in group)]
        others = [group for group in groups if group not in joined]
        groups = [*others, [*(j for group in joined for j in group), i]]
    return sorted(sorted(group) for group in groups)


def _dependencies(graph: ModelGraph, around: Call, calls: Sequence[Call]) -> list[set[int]]:
    """For each call, the indices of the calls on which it depends."""
    inside = {p: i for i, c in enumerate(calls) for p in range(c.start, c.stop)}
    before: list[set[int]] = [set() for _ in calls]
    of_value: dict[int, set[int]] = {}
    for p in range(around.start, around.stop):
        event, i = graph.events[p], inside.get(p)
        dependencies = {d for n in event.inputs for d in of_value.get(n, ())}
        if i is not None:
            before[i] |= dependencies - {i}
            dependencies = before[i] | {i}
        for n in (*event.outputs, event.written):
            if n is not None:
                of_value[n] = dependencies
    return before


# --- places for the branches ------------------------------------------------------------------------------------------


def wants_branches(plan: Plan) -> bool:
    """Whether a plan asks us to choose which modules run at the same time (``branches: auto``, or ``on: auto``)."""
    return plan.branches == "auto" or any(entry.on == "auto" for entry in plan.modules.values())


def place_concurrent(plan: Plan, entries: Mapping[str, Entry], graph: ModelGraph) -> tuple[Plan, list[str]]:
    """The plan with each ``auto`` replaced by slices of tp, and notes on the branches for a person.

    The tp ranks are divided so that the slowest branch of a region is as fast as possible, if work divides evenly.

    Args:
        entries: module → the plan's settings for it.
        graph: the recorded forward.
    """
    ranks, slices, notes = plan.mesh.axis_size("tp"), dict[str, list[str]](), list[str]()
    placed_by_plan = {name for name, entry in entries.items() if entry.on not in (None, "auto")}
    names = [""] if plan.branches == "auto" else [name for name, entry in entries.items() if entry.on == "auto"]
    regions: list[_Placed] = []
    for branches in (r for name in names for r in concurrent(graph, name)):
        modules = [m for branch in branches for m in branch.modules]
        if plan.mesh.axis_size("pp") > 1 and _shares(branches, graph):
            continue  # a shared parameter may be on another stage
        if ranks > 1 and not any(_within(m, name) or _within(name, m) for m in modules for name in placed_by_plan):
            regions.append(list(zip(branches, _slices([b.work for b in branches], ranks), strict=True)))
    for region in _admitted([], regions, lambda some: _can_run(some, plan.mesh, graph)):
        for branch, on in region:
            for module in branch.modules:
                slices.setdefault(module, []).append(on)
        if len(notes) < 3:
            notes.append("at the same time: " + " | ".join(f"{branch.modules[0]} on {on}" for branch, on in region))
    if not slices:
        notes.append("branches: auto: nothing in this model was found that could run at the same time")
    placed = {m: {"on": on[0] if len(set(on)) == 1 else on} for m, on in slices.items()}
    rest = {
        glob: {**entry.settings(), "on": None} if entry.on == "auto" else entry.settings()
        for glob, entry in plan.modules.items()
    }
    settings = {k: v for k, v in plan.settings().items() if k not in ("modules", "branches")}
    return Plan.from_dict({**settings, "modules": {**placed, **rest}}), notes


def _shares(branches: Sequence[Candidate], graph: ModelGraph) -> bool:
    """Whether events outside ``branches`` use a parameter of theirs."""
    inside = {p for branch in branches for p in branch.positions}
    return any(not inside.issuperset(graph.uses[name]) for p in inside for name in graph.events[p].parameters)


def _admitted(known: list[_Placed], regions: list[_Placed], can_run: Callable[[list[_Placed]], bool]) -> list[_Placed]:
    """``known`` and those of ``regions`` that can run as well. Tries all at once first; if that fails, half of them, then the
    other half."""
    if not regions or can_run([*known, *regions]):
        return [*known, *regions]
    if len(regions) == 1:
        return known
    half = len(regions) // 2
    return _admitted(_admitted(known, regions[:half], can_run), regions[half:], can_run)


def _can_run(regions: Sequence[_Placed], mesh: Mesh, graph: ModelGraph) -> bool:
    """Whether each branch runs beside another in the whole forward, with no function between them that makes one wait, and no
    value that is read, and no state of modules that they share."""
    spots = {on: read_slice(on) or (0, 0) for region in regions for _, on in region}
    inner = {on: Submesh(on, 0, a, b, Mesh((("tp", b - a),))) for on, (a, b) in spots.items()}
    number = {on: i for i, on in enumerate(inner, 1)}
    placed: dict[str, tuple[int, ...]] = {}
    for region in regions:
        for branch, on in region:
            for module in branch.modules:
                placed[module] = (*placed.get(module, ()), number[on])
    places = Submeshes(mesh, (trunk(mesh), *inner.values()))
    actual = find_regions(graph, placed, places)
    beside = {p for start, stop in actual.spans_of_several for p in range(start, stop)}
    together = all(not beside.isdisjoint(branch.positions) for region in regions for branch, _ in region)
    tied = ties_by_reads(actual, placed, places, graph) or slots_of_two_places(placed, places, graph)
    return together and not tied and not changed_in_checkpoints(placed, places, graph)


def _within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _slices(work: Sequence[int], ranks: int) -> list[str]:
    """A slice of tp for each branch, as text (``tp[0:2]``). If there are more branches than ranks, some share a slice."""
    bins: list[list[int]] = [[] for _ in range(min(ranks, len(work)))]
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        min(bins, key=lambda b: sum(work[j] for j in b)).append(i)
    bins.sort(key=min)
    loads = [sum(work[i] for i in b) for b in bins]
    split = best_split([[load / g for g in range(1, ranks + 1)] for load in loads], ranks)
    spare, places, start = ranks - sum(split), [""] * len(work), 0
    for b, size in zip(bins, split, strict=True):
        size, spare = size + spare, 0  # ranks that make nothing faster go to the first slice
        for i in b:
            places[i] = f"tp[{start}:{start + size}]"
        start += size
    return places


__all__ = ["Candidate", "concurrent", "place_concurrent", "wants_branches"]
