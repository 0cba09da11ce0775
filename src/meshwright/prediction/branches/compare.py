"""``compare_branches``: compares ways to run the branches of a plan: on different ranks, by data or tensor, on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from meshwright.prediction.branches.comparison import Comparison, RegionWays
from meshwright.prediction.branches.ways import Region, RegionCost, read_regions
from meshwright.prediction.branches.work import EventCosts, Parameters
from meshwright.recipe import Recipe
from meshwright.regions import find_regions
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.runtime.rows.microbatches import call_model, rows_of, take_rows
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
    """Compares running the branches of a plan on different ranks with data parallelism, tensor parallelism and one device.

    It starts no process and allocates no parameter. ``print`` the result for a table and a verdict.

    Args:
        build: a function that builds the model.
        batch: a batch of all data ranks together. Only its shapes and dtypes matter.
        plan: a plan with a mesh and with branches (``on: tp[0:2]``).
        loss: output of the model → loss; default ``output.loss``.
        hardware: a profile, its name, or the path of its YAML file; ``cpu-local`` is this machine.
        tables: (branch, number of ranks) → measured seconds of its forward and backward, in place of predicted ones. The
            name of a branch is that in the printed table; a glob may match several branches.

    Raises:
        PlanError: every problem of the plan or the profile; or no branches of the plan can run at the same time.
        ValueError: ``tables`` names no branch, or less than one rank.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    planned = PlannedRegions.of(build, batch, Plan.parse(plan), loss or output_loss)
    measured = _seconds_by_branch(tables or {}, planned.regions)
    return Comparison(profile, tuple(map(_compared, planned.costs(profile, measured))))


@dataclass(frozen=True)
class PlannedRegions:
    """The regions of the branches of a plan, in the recorded forward of a microbatch.

    Attributes:
        recipe: of the plan.
        graph: the recorded forward.
        regions: the regions, in the order in which they run.
        rows: rows of the recorded microbatch on a data rank.
        shards: a number of tensor-parallel ranks → the parameters that are sharded over so many ranks without branches.
    """

    recipe: Recipe
    graph: ModelGraph
    regions: list[Region]
    rows: int
    shards: Callable[[int], Mapping[str, Shard]]

    @classmethod
    def of(cls, build: Build, batch: Any, plan: Plan, loss: Loss) -> PlannedRegions:
        """Plans a model, and records its forward. For the arguments and the error, see ``compare_branches``."""
        planned = Planned(build, plan, batch, loss, whole_batch=True)
        recipe = planned.recipe
        rows = max(1, -(-rows_of(batch) // (plan.mesh.data_size * recipe.microbatches)))
        microbatch = take_rows(batch, 0, rows)
        if rows != rows_of(batch):
            planned = Planned(build, plan, microbatch, loss)
        graph = planned.graph(lambda model: loss(call_model(model, copied(microbatch))))
        regions = _regions(planned, recipe, graph, rows)
        planned_sizes = {p.tp for p in recipe.branches} | {1 << n for n in range(10)} | {r.ranks for r in regions}

        @cache
        def shards(tp: int) -> Mapping[str, Shard]:
            """The sharded parameters; if not planned, as over the next fewer ranks."""
            if tp not in planned_sizes:
                below = shards(max(n for n in planned_sizes if n < tp))
                return {n: even_shard(c.dim, c.size, tp) for n, c in below.items()}
            recipe_of_tp = Planned(build, _without_branches(plan, tp), microbatch, loss).recipe
            return {n: p.tp for n, p in recipe_of_tp.by_name.items() if isinstance(p.tp, Shard)}

        return cls(recipe, graph, regions, rows, shards)

    def costs(
        self, profile: Profile, measured: Mapping[tuple[str, int], float] | None = None, scale: float = 1.0
    ) -> list[RegionCost]:
        """The costs of the regions.

        Args:
            profile: the hardware.
            measured: (branch, number of ranks) → measured seconds, in place of predicted ones.
            scale: rows of a microbatch on a data rank / ``rows``.
        """
        event_costs = self.event_costs(profile)
        return [
            RegionCost(region, self.recipe.places, event_costs, self.rows, self.shards, measured or {}, scale)
            for region in self.regions
        ]

    def event_costs(self, profile: Profile) -> EventCosts:
        """The costs of the events of the forward."""
        return EventCosts(self.graph, profile, Parameters.of(self.recipe))


def _compared(cost: RegionCost) -> RegionWays:
    """The ways to run a region, as plain values."""
    tables = tuple(map(tuple, cost.tables))
    return RegionWays(cost.region.name, cost.ranks, cost.rows, tuple(cost.ways), tables, cost.parameter_bytes)


def _regions(planned: Planned, recipe: Recipe, graph: ModelGraph, rows: int) -> list[Region]:
    """The regions of the plan. Raises PlanError if no region has several branches."""
    places = recipe.places

    def branch_name(positions: Any, place: int) -> str:
        """The outermost modules that begin at these positions; without any, the functions there."""
        starts = set(positions)
        calls = [call for call in graph.calls.values() if call.start in starts and call.module in recipe.placed]
        calls = [call for call in calls if _is_placed_within(places, recipe.placed[call.module], place)]
        modules = [module for _, module in sorted((call.start, call.module) for call in calls)]
        outermost = dict.fromkeys(name for name in modules if not _is_submodule(name, modules))
        return "+".join(outermost or dict.fromkeys(graph.events[p].function for p in positions))

    @cache
    def rows_are_independent(place: int) -> bool:
        """Whether two data ranks of a place could each run rows of their own."""
        if rows < 2:
            return True
        over_two_ranks = replace(places[place], mesh=Mesh((("dp_replicate", 2),)))
        return planned.rows_apart(over_two_ranks, graph)

    regions = read_regions(find_regions(graph, recipe.placed, places), places, branch_name, rows_are_independent)
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


def _is_placed_within(places: Submeshes, homes: tuple[int, ...], place: int) -> bool:
    """Whether one of the places ``homes`` is ``place``, or within it."""
    return any(place in places.chain(p) for p in homes)


def _is_submodule(name: str, names: list[str]) -> bool:
    """Whether ``name`` is a submodule of one of the modules ``names``."""
    return any(name.startswith(n + ".") for n in names)


def _seconds_by_branch(tables: Tables, regions: list[Region]) -> dict[tuple[str, int], float]:
    """(branch, ranks) → measured seconds. Each glob of ``tables`` is replaced by the branches that it matches.

    Raises:
        ValueError: a glob matches no branch, or ``ranks`` is below 1.
    """
    names = list(dict.fromkeys(b.name for r in regions for b in r.branches))
    by_branch: dict[tuple[str, int], float] = {}
    for (glob, ranks), seconds in tables.items():
        matching = [n for n in names if fnmatchcase(n, glob)]
        if not matching or ranks < 1:
            raise ValueError(
                f"tables: ({glob!r}, {ranks}) is no branch on some ranks; the branches are {', '.join(names)}"
            )
        by_branch |= {(n, ranks): seconds for n in matching}
    return by_branch


def _without_branches(plan: Plan, tp: int) -> Plan:
    """The plan on the mesh ``tp=N``, without branches, microbatches and pipeline. Its settings for shards stay."""
    module_settings = {
        glob: {k: v for k, v in module_plan.settings().items() if k not in ("on", "mesh")}
        for glob, module_plan in plan.modules.items()
    }
    left_out = ("mesh", "modules", "branches", "microbatches", "schedule", "stages_per_rank")
    settings_left = {k: v for k, v in plan.settings().items() if k not in left_out}
    return Plan.from_dict(
        {
            **settings_left,
            "mesh": {"tp": tp},
            "modules": {glob: words for glob, words in module_settings.items() if words},
        }
    )
