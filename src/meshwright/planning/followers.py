"""Modules that a plan does not place and whose inputs come from one branch only: each runs on that branch's ranks.

    tower_a ─► project_a ─┐        plan: tower_a on tp[0], tower_b on tp[1]
    tower_b ─► project_b ─┴─► loss

``project_a`` uses the result of ``tower_a``. On the ranks of the trunk it would have to wait for ``tower_a``. ``tower_b``,
which the model calls next, would wait too: the towers would run one after the other. On the ranks of ``tower_a`` nobody waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from meshwright.graph import ROOT, Call, ModelGraph
from meshwright.regions import Join, PlacesOfCalls, Regions, find_regions
from meshwright.submesh import Submeshes


def followers(graph: ModelGraph, placed: PlacesOfCalls, places: Submeshes) -> dict[str, int]:
    """Module → the branch with which it must run, so that branches run at the same time.

    Returns:
        An empty dict if the branches run at the same time already, or if moving modules does not make them do so.
    """
    moved: dict[str, int] = {}
    for _ in graph.calls:
        together: Mapping[str, tuple[int, ...]] = {**placed, **{module: (branch,) for module, branch in moved.items()}}
        regions = find_regions(graph, together, places)
        if not any(True for _ in unaccompanied(regions, places)):
            return moved
        for branch, join in unaccompanied(regions, places):
            waiting = first_wait(regions, places, graph, join)
            call = None if waiting is None else _fed_by(regions, graph, together, *waiting)
            if call is not None:
                moved[call.module] = regions.places[graph.values[waiting[1]].position] if waiting else branch
                break
        else:
            return {}
    return {}


def unaccompanied(regions: Regions, places: Submeshes) -> Iterator[tuple[int, Join]]:
    """Yields each branch that runs in no region with another, although the plan has others of the same parent; and its join."""
    for branch, join in regions.alone().items():
        if any(places[p].parent == places[branch].parent and p != branch for p in places.branches):
            yield branch, join


def first_wait(regions: Regions, places: Submeshes, graph: ModelGraph, join: Join) -> tuple[int, int] | None:
    """The event that ended the region before a join: the first event outside a branch that uses a value of the branch.

    Returns:
        (the event's position, the value's number), or None if there is no such event.
    """
    joins = sorted(
        (m for m in regions.forks_and_joins if isinstance(m, Join) and m.around == join.around),
        key=lambda m: m.position,
    )
    ended = joins[max(0, joins.index(join) - (join is joins[-1]))]
    homes = dict(ended.values)
    for position in range(ended.position, len(graph.events)):
        for number in graph.events[position].inputs:
            if number in homes and homes[number] not in places.chain(regions.places[position]):
                return position, number
    return None


def _fed_by(regions: Regions, graph: ModelGraph, placed: PlacesOfCalls, position: int, number: int) -> Call | None:
    """The outermost call around an event whose inputs come only from the trunk and from the branch that made value ``number``.

    None if there is no such call; a call is skipped if its module is called more than once, has events in a branch, or is or
    contains a placed module.
    """
    branch = regions.places[graph.values[number].position]
    calls = Counter(call.module for call in graph.calls.values())
    path = graph.events[position].path
    for depth in range(1, len(path) + 1):
        call = graph.calls[path[:depth]]
        inside = range(call.start, call.stop)
        if call.path == ROOT or calls[call.module] > 1 or any(regions.places[p] for p in inside) or not inside:
            continue
        if any(name == call.module or name.startswith(call.module + ".") for name in placed):
            continue
        inputs = {n for p in inside for n in graph.events[p].inputs if graph.values[n].position < call.start}
        if {regions.places[graph.values[n].position] for n in inputs} <= {0, branch}:
            return call
    return None
