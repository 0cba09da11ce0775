"""``compare_branches``: does it pay to run the branches of a plan on different ranks? Composes planning and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from meshwright.deferred import Build
from meshwright.errors import Findings
from meshwright.graph import ModelGraph
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile
from meshwright.layout import Shard, even_shard
from meshwright.mesh import Mesh
from meshwright.plan import Plan, PlanLike
from meshwright.planned import Planned
from meshwright.prediction.branches.comparison import Compared, Comparison
from meshwright.prediction.branches.ways import Region, RegionCost, read_regions
from meshwright.prediction.branches.work import Meter, Parameters
from meshwright.recipe import Recipe
from meshwright.regions import find_regions
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.runtime.rows.microbatches import called, rows_of, take_rows
from meshwright.submesh import Submeshes

Tables = Mapping[tuple[str, int], float]


def compare_branches(
    build: Build,
    batch: Any,
    plan: PlanLike,
    *,
    loss: Loss | None = None,
    hardware: str | Profile = "h100",
    tables: Tables | None = None,
) -> Comparison:
    """Does it pay to run the branches of a plan on different ranks? Against data and tensor parallelism, and one device.

    Starts no process and allocates no parameter.

    Args:
        build: makes the model.
        batch: a sample, of all data ranks together, of which shapes and types count.
        plan: which modules are branches (``on: tp[0:2]``), and the mesh.
        loss: of the model's output; default ``output.loss``.
        hardware: a profile, its name, or the path of its YAML file, as ``predict`` takes it; ``cpu-local`` is this machine.
        tables: (branch, ranks) → seconds of its forward and backward, measured, in place of what is predicted. A branch is
            called by the modules that it runs in a region, as the table prints it; a glob names several.

    Raises:
        PlanError: with every problem of the plan or the profile; where it has no branches beside each other.
    """
    plan, loss = Plan.parse(plan), loss or output_loss
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    recipe = Planned(build, plan, batch, loss, whole_batch=True).recipe
    rows = max(1, -(-rows_of(batch) // (plan.mesh.data_size * recipe.microbatches)))
    piece = take_rows(batch, 0, rows)
    planned = Planned(build, plan, piece, loss)
    graph = planned.graph(lambda model: loss(called(model, copied(piece))))
    regions = _regions(planned, recipe, graph, rows)
    meter = Meter(graph, profile, Parameters.of(recipe))
    measured = _named(tables or {}, regions)
    looked_at = {p.tp for p in recipe.branches} | {1 << n for n in range(10)} | {r.ranks for r in regions}

    @cache
    def cuts(tp: int) -> Mapping[str, Shard]:
        """The cuts of the same model over so many ranks, without branches; between those looked at, by the one below."""
        if tp not in looked_at:
            below = cuts(max(n for n in looked_at if n < tp))
            return {n: even_shard(c.dim, c.size, tp) for n, c in below.items()}
        alone = Planned(build, _without_branches(plan, tp), piece, loss).recipe
        return {n: p.tp for n, p in alone.by_name.items() if isinstance(p.tp, Shard)}

    costs = [RegionCost(r, recipe.places, meter, rows, cuts, measured) for r in regions]
    return Comparison(profile, tuple(
        Compared(c.region.name, c.ranks, rows, tuple(c.ways), tuple(map(tuple, c.tables)), c.parameter_bytes) for c in costs
    ))  # fmt: skip


def _regions(planned: Planned, recipe: Recipe, graph: ModelGraph, rows: int) -> list[Region]:
    """The regions of the plan. Raises PlanError if no region has several branches."""
    places = recipe.places

    def modules(positions: Any, place: int) -> str:
        inside = set(positions)
        starts = sorted(
            (c.start, c.module) for c in graph.calls.values()
            if c.module in recipe.placed and c.start in inside and _within(places, recipe.placed[c.module], place)
        )  # fmt: skip
        outermost = dict.fromkeys(name for _, name in starts if not _above(name, [n for _, n in starts]))
        return "+".join(outermost or dict.fromkeys(graph.events[p].function for p in positions))

    @cache
    def apart(place: int) -> bool:
        if rows < 2:
            return True
        two = replace(places[place], mesh=Mesh((("dp_replicate", 2),)))
        return planned.rows_apart(two, graph)

    regions = read_regions(find_regions(graph, recipe.placed, places), places, modules, apart)
    findings = Findings()
    if all(len(r.branches) < 2 for r in regions):
        findings.add(
            where="modules",
            given="no branches that run beside each other",
            required="modules on different slices of tp, between which nothing passes",
            fix="block_a: {on: 'tp[0]'}\nblock_b: {on: 'tp[1]'}",
        )
    findings.raise_if_any()
    return regions


def _within(places: Submeshes, homes: tuple[int, ...], place: int) -> bool:
    return any(place in places.chain(p) for p in homes)


def _above(name: str, names: list[str]) -> bool:
    """Whether ``names`` has a module that contains the module ``name``."""
    return any(name.startswith(n + ".") for n in names)


def _named(tables: Tables, regions: list[Region]) -> dict[tuple[str, int], float]:
    """The measured seconds by (branch, ranks): each glob is replaced by the branches that match.

    Raises:
        ValueError: a glob matches no branch, or ``ranks`` is below 1.
    """
    names = list(dict.fromkeys(b.name for r in regions for b in r.branches))
    by_branch: dict[tuple[str, int], float] = {}
    for (glob, ranks), seconds in tables.items():
        matched = [n for n in names if fnmatchcase(n, glob)]
        if not matched or ranks < 1:
            raise ValueError(
                f"tables: ({glob!r}, {ranks}) is no branch on some ranks; the branches are {', '.join(names)}"
            )
        by_branch |= {(n, ranks): seconds for n in matched}
    return by_branch


def _without_branches(plan: Plan, tp: int) -> Plan:
    """The plan on the mesh ``tp=N``, without branches. What it says about cuts stays."""
    settings = {
        glob: {k: v for k, v in module_plan.settings().items() if k not in ("on", "mesh")}
        for glob, module_plan in plan.modules.items()
    }
    ours = ("mesh", "modules", "branches", "microbatches", "schedule", "stages_per_rank")
    rest = {k: v for k, v in plan.settings().items() if k not in ours}
    return Plan.from_dict(
        {**rest, "mesh": {"tp": tp}, "modules": {glob: words for glob, words in settings.items() if words}}
    )
