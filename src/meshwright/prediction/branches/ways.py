"""``RegionCost``: seconds of a region of branches on G ranks, by each way to run it.

The ways are: one device, data parallel, tensor parallel, and branches at the same time on different ranks. All seconds are of
one forward and backward of a microbatch on the rows of a data rank, without the optimizer. Branch i takes cᵢ(g) seconds on g
ranks: the least of all meshes dp × tp with at most g ranks, predicted (work.py) or measured. In a job, the host takes longer
(``Profile.job_call``). Branches at the same time take

    max cᵢ(gᵢ) + fork (in the backward: one all-reduce of gradients of their inputs) + join (in the forward: one all-to-all)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from meshwright.layout import Shard
from meshwright.mesh import Mesh
from meshwright.planning.split import best_split, imbalance, monotone
from meshwright.prediction.branches.traffic import NOTHING, Traffic, all_reduce, fork_traffic, join_traffic
from meshwright.prediction.branches.work import EventCost, EventCosts
from meshwright.regions import Fork, Join, Regions
from meshwright.submesh import Submesh, Submeshes

ONE, DATA, TENSOR, PLANNED, BEST = (
    "one device",
    "data parallel",
    "tensor parallel",
    "branches, as planned",
    "branches, best",
)

ShardsByRanks = Callable[[int], Mapping[str, Shard]]
"""Number of tensor-parallel ranks → name → shards of each parameter that is sharded over so many ranks."""


@dataclass(frozen=True)
class Branch:
    """One branch of a region.

    Attributes:
        name: the modules that it runs in this region.
        place: number of its place (submesh.py).
        positions: positions of its events in the recorded forward.
        apart: whether data ranks can each run rows of their own.
    """

    name: str
    place: int
    positions: tuple[int, ...]
    apart: bool


@dataclass(frozen=True)
class Region:
    """Branches between their forks and their join. ``ranks``: number of ranks of the place around them."""

    branches: tuple[Branch, ...]
    forks: tuple[Fork, ...]
    join: Join
    ranks: int

    @property
    def name(self) -> str:
        """Names of its branches, ``a | b``."""
        return " | ".join(b.name for b in self.branches)

    @property
    def positions(self) -> list[int]:
        """Positions of the events of all branches, in order."""
        return sorted(p for b in self.branches for p in b.positions)


def read_regions(
    regions: Regions,
    places: Submeshes,
    name_of: Callable[[Sequence[int], int], str],
    rows_are_independent: Callable[[int], bool],
) -> list[Region]:
    """The regions of a recorded forward, in the order in which they run, including those of one branch.

    Args:
        name_of: (positions of a branch's events, its place) → its name.
        rows_are_independent: a place → whether data ranks can each run rows of their own.
    """
    listed = []
    for join in (move for move in regions.forks_and_joins if isinstance(move, Join)):
        positions_of: dict[int, list[int]] = {branch: [] for branch in join.branches}
        for position in range(join.first, join.position):
            place = regions.places[position]
            if place != join.around and join.around in places.chain(place):
                positions_of[places.child(place, join.around)].append(position)
        forks = tuple(
            move for move in regions.forks_and_joins
            if isinstance(move, Fork) and move.around == join.around and join.first <= move.position < join.position
        )  # fmt: skip
        branches = tuple(
            Branch(name_of(positions, branch), branch, tuple(positions), rows_are_independent(branch))
            for branch, positions in positions_of.items()
        )
        listed.append(Region(branches, forks, join, places[join.around].tp))
    return listed


@dataclass(frozen=True)
class RegionStrategy:
    """One way to run a region, and its cost on the slowest rank.

    Attributes:
        name: one of ONE, DATA, TENSOR, PLANNED and BEST.
        ranks: number of ranks.
        seconds: seconds of a forward and backward, with collectives.
        compute: of these, seconds without collectives. Seconds from measured tables include the collectives within branches.
        traffic: the collectives of a rank.
        imbalance: seconds of compute / those if all ranks computed all the time.
        split: number of ranks of each branch; empty if branches do not run at the same time.
        note: what limits this way.
        crossing: for each tp rank, its collectives in forks and joins.
    """

    name: str
    ranks: int
    seconds: float
    compute: float
    traffic: Traffic = NOTHING
    imbalance: float = 1.0
    split: tuple[int, ...] = ()
    note: str = ""
    crossing: tuple[Traffic, ...] = ()


@dataclass(frozen=True)
class BranchCost:
    """The cost of a branch on some ranks. ``mesh``: the mesh that these ranks form."""

    seconds: float
    spent: EventCost
    mesh: Mesh


class RegionCost:
    """Computes the ways to run one region.

    Args:
        region: the region.
        places: the places of the plan.
        event_costs: costs of the events of the recorded forward.
        rows: rows of the recorded batch; None: it has none.
        shards: number of tensor-parallel ranks → shards of the parameters.
        measured_seconds: (name of a branch, number of ranks) → measured seconds, in place of predicted ones.
        scale: rows of the costs / ``rows``. It scales work and bytes of values; bytes of parameters stay.
    """

    def __init__(
        self,
        region: Region,
        places: Submeshes,
        event_costs: EventCosts,
        rows: int | None,
        shards: ShardsByRanks,
        measured_seconds: Mapping[tuple[str, int], float],
        scale: float = 1.0,
    ) -> None:
        self.region, self.places, self.event_costs, self.rows = region, places, event_costs, rows
        self.shards, self.measured_seconds, self.scale = shards, measured_seconds, scale
        self.profile = event_costs.profile

    @property
    def ranks(self) -> int:
        """Number of ranks of the place around the region."""
        return self.region.ranks

    @cached_property
    def branch_costs(self) -> list[list[BranchCost]]:
        """For each branch, its cost on 1, 2 … G ranks."""
        return [self._costs_on_all(b) for b in self.region.branches]

    @cached_property
    def tables(self) -> list[list[float]]:
        """For each branch, cᵢ(g) on g = 1, 2 … G ranks. More ranks never take longer, since some of them can be idle."""
        return [monotone([cost.seconds for cost in costs]) for costs in self.branch_costs]

    @cached_property
    def ways(self) -> list[RegionStrategy]:
        """All ways to run the region. The first is on one device."""
        ways = [self._one(), self._by_data(), self._by_tensor(), self._beside(PLANNED, self.places)]
        if len(self.region.branches) <= self.ranks:
            ways.append(self._best())
        return ways

    @property
    def parameter_bytes(self) -> tuple[int, int]:
        """Bytes of parameters that a rank gathers and reduces if data ranks shard them: (with the planned branches, with all).

        The second number is that of FSDP without branches.
        """
        gathered = [0] * self.ranks
        for b in self.region.branches:
            submesh = self.places[b.place]
            shards = self.shards(submesh.tp) if submesh.tp > 1 else {}
            nbytes = self._gathered(b.positions, shards)
            for r in range(submesh.start, submesh.stop):
                gathered[r] += nbytes
        return max(gathered), self._gathered(self.region.positions, {})

    def _gathered(self, positions: Sequence[int], shards: Mapping[str, Shard]) -> int:
        """Bytes that a rank gathers and reduces of the parameters of events."""
        return self.event_costs.bytes(positions, shards) + self.event_costs.reduced(positions, shards)

    # --- a branch ---------------------------------------------------------------------------------------------------

    def _costs_on_all(self, branch: Branch) -> list[BranchCost]:
        """The cost of a branch on 1, 2 … G ranks, each on its fastest mesh."""
        costs: list[BranchCost] = []
        for ranks in range(1, self.ranks + 1):
            meshes = [_mesh(ranks // tp, tp) for tp in range(1, ranks + 1) if ranks % tp == 0]
            cost = min((self._cost_on(branch, mesh) for mesh in meshes), key=lambda cost: cost.seconds)
            if (seconds := self.measured_seconds.get((branch.name, ranks))) is not None:
                cost = BranchCost(seconds, EventCost(seconds), cost.mesh)
            costs.append(cost)
        return costs

    def _cost_on(self, branch: Branch, mesh: Mesh) -> BranchCost:
        """The predicted cost of a branch on a mesh that no other branch uses."""
        data, tp = mesh.axis_size("dp_replicate") * mesh.axis_size("dp_shard"), mesh.axis_size("tp")
        positions, shards = list(branch.positions), self.shards(tp) if tp > 1 else {}
        rows = self._share(data) if branch.apart else self.scale
        spent = (
            self.event_costs.over_tp(positions, shards, tp, rows)
            if tp > 1
            else self.event_costs.on_one_device(positions, rows)
        )
        if data > 1:
            spent += EventCost(traffic=all_reduce(self.event_costs.reduced(positions, shards), data, tp))
        return BranchCost(spent.seconds(self.profile), spent, mesh)

    def _share(self, pieces: int) -> float:
        """The fraction of the rows on the rank that has most of them, if they are split over ``pieces`` ranks."""
        return self.scale if self.rows is None else ceil(self.rows * self.scale / pieces) / self.rows

    # --- ways -------------------------------------------------------------------------------------------------------

    @property
    def _one_rank_seconds(self) -> list[float]:
        """cᵢ(1) of each branch."""
        return [costs[0].seconds for costs in self.branch_costs]

    def _one(self) -> RegionStrategy:
        return RegionStrategy(ONE, 1, sum(self._one_rank_seconds), sum(self._one_rank_seconds))

    def _by_data(self) -> RegionStrategy:
        ranks, region = self.ranks, self.region
        share, note = self._share(ranks), ""
        if not all(b.apart for b in region.branches):
            share, note = self.scale, "rows depend on each other: each rank runs all rows"
        elif self.rows is None or self.rows < ranks:
            note = f"{self.rows or 'no'} row{'s' * (self.rows != 1)}: {ranks - (self.rows or 1)} of {ranks} ranks have none"
        spent = self._by_tables(self.event_costs.on_one_device(region.positions, share)) + self._added_by_job(
            region.positions
        )
        spent += EventCost(traffic=all_reduce(self.event_costs.reduced(region.positions, {}), ranks))
        return self._way(DATA, spent, imbalance=share * ranks, note=note)

    def _by_tensor(self) -> RegionStrategy:
        spent, shards = self._by_tables(self.over_tp()), self._shards_of_all
        names = self.event_costs.names(self.region.positions)
        note = "" if any(n in shards for n in names) else "no parameter of the region can be sharded"
        return self._way(TENSOR, spent + self._added_by_job(self.region.positions), note=note)

    @property
    def _shards_of_all(self) -> Mapping[str, Shard]:
        """The parameters that are sharded over all ranks."""
        return self.shards(self.ranks) if self.ranks > 1 else {}

    def over_tp(self) -> EventCost:
        """The cost on one of all ranks if these are tensor parallel, without what a job adds."""
        return self.event_costs.over_tp(self.region.positions, self._shards_of_all, self.ranks, self.scale)

    def slowest_branch(self) -> EventCost:
        """The cost on the rank whose branches take longest at their places, with forks and join, without what a job adds."""
        submeshes = [self.places[branch.place] for branch in self.region.branches]
        placed = [self._placed(branch, places) for branch, places in zip(self.region.branches, submeshes, strict=True)]
        by_rank = self._spent_by_rank(submeshes, placed, self._crossing(self.places))
        return max(by_rank, key=lambda spent: spent.seconds(self.profile))

    @staticmethod
    def _spent_by_rank(
        submeshes: Sequence[Submesh], costs: Sequence[BranchCost], crossing: Sequence[Traffic]
    ) -> list[EventCost]:
        """For each rank, the cost of the branches that it runs. ``crossing``: its collectives in forks and the join."""
        return [
            sum((costs[i].spent for i in _branches_on(rank, submeshes)), EventCost(traffic=traffic))
            for rank, traffic in enumerate(crossing)
        ]

    def _by_tables(self, spent: EventCost) -> EventCost:
        """``spent`` times measured ÷ predicted seconds of all branches on one device. Without tables the factor is 1."""
        predicted = sum(self.event_costs.on_one_device(b.positions).seconds(self.profile) for b in self.region.branches)
        measured = sum(self._one_rank_seconds) / max(predicted, 1e-30)
        return replace(spent, device=measured * spent.device, host=measured * spent.host)

    def _beside(self, name: str, places: Submeshes, costs: Sequence[BranchCost] | None = None) -> RegionStrategy:
        """The way in which branches run at their places at the same time.

        ``costs``: the cost of each branch at its place; default: that of the branch on its planned mesh.
        """
        region = self.region
        alone = costs or [self._placed(branch, places[branch.place]) for branch in region.branches]
        in_job = [self._in_job(branch, cost) for branch, cost in zip(region.branches, alone, strict=True)]
        submeshes = [places[branch.place] for branch in region.branches]
        crossing = self._crossing(places)
        spent_by_rank = self._spent_by_rank(submeshes, in_job, crossing)
        branch_seconds = [
            sum(in_job[i].seconds for i in _branches_on(rank, submeshes)) for rank in range(len(crossing))
        ]
        # All ranks wait for the slowest branch, and then for the slowest part of the exchange.
        seconds = max(branch_seconds) + max(EventCost(traffic=traffic).seconds(self.profile) for traffic in crossing)
        slowest = max(spent_by_rank, key=lambda spent: spent.seconds(self.profile))
        return RegionStrategy(
            name,
            self.ranks,
            seconds,
            slowest.compute(self.profile),
            max((spent.traffic for spent in spent_by_rank), key=lambda traffic: (traffic.bytes, traffic.calls)),
            self._imbalance(submeshes),
            tuple(submesh.size for submesh in submeshes),
            _meshes(submeshes),
            tuple(crossing),
        )

    def _crossing(self, places: Submeshes) -> list[Traffic]:
        """For each rank, its collectives in the forks and the join of the region."""
        graph, region = self.event_costs.graph, self.region
        joins = join_traffic(graph, region.join, places, self.rows)
        forks = fork_traffic(graph, region.forks, region.join.around, places, self.rows)
        return [(fork + join).scaled(self.scale) for fork, join in zip(forks, joins, strict=True)]

    def _placed(self, branch: Branch, submesh: Submesh) -> BranchCost:
        """The cost of a branch on its place, measured if it is in the tables."""
        cost = self._cost_on(branch, submesh.mesh)
        seconds = self.measured_seconds.get((branch.name, submesh.size))
        return cost if seconds is None else BranchCost(seconds, EventCost(seconds), submesh.mesh)

    def _added_by_job(self, positions: Sequence[int]) -> EventCost:
        """The seconds of the host that a job adds to these events."""
        return EventCost(host=self.profile.job_call * len(positions))

    def _in_job(self, branch: Branch, cost: BranchCost) -> BranchCost:
        """The cost of a branch with the seconds that a job adds."""
        spent = cost.spent + self._added_by_job(branch.positions)
        return replace(cost, seconds=spent.seconds(self.profile), spent=spent)

    def _imbalance(self, submeshes: Sequence[Submesh]) -> float:
        """max(cᵢ/gᵢ)·G/Σcᵢ, with cᵢ = cᵢ(1). If a rank runs several branches, their cᵢ/gᵢ are added."""
        seconds, sizes = self._one_rank_seconds, [submesh.size for submesh in submeshes]
        branches_by_rank = [_branches_on(rank, submeshes) for rank in range(self.ranks)]
        if all(len(branches) <= 1 for branches in branches_by_rank):
            return imbalance(seconds, sizes) * (self.ranks / sum(sizes))
        loads = [sum(seconds[i] / sizes[i] for i in branches) for branches in branches_by_rank]
        return max(loads) * self.ranks / sum(seconds)

    def _best(self) -> RegionStrategy:
        """The way with the fastest split of ranks between branches."""
        in_job = [
            [self._in_job(branch, cost).seconds for cost in costs_by_ranks]
            for branch, costs_by_ranks in zip(self.region.branches, self.branch_costs, strict=True)
        ]
        split = best_split(in_job, self.ranks)
        costs, submeshes, start = [], list(self.places.all), 0
        for branch, costs_by_ranks, ranks in zip(self.region.branches, self.branch_costs, split, strict=True):
            cost = costs_by_ranks[ranks - 1]
            splits = branch.apart and cost.mesh.axis_size("dp_replicate") > 1
            submeshes[branch.place] = replace(
                submeshes[branch.place], on="", start=start, stop=start + ranks, mesh=cost.mesh, splits=splits
            )
            costs.append(cost)
            start += ranks
        way = self._beside(BEST, replace(self.places, all=tuple(submeshes)), costs)
        idle = self.ranks - sum(split)
        return replace(way, note=f"{way.note}; {idle} idle".removeprefix("; ")) if idle else way

    def _way(self, name: str, spent: EventCost, *, imbalance: float = 1.0, note: str = "") -> RegionStrategy:
        seconds, compute = spent.seconds(self.profile), spent.compute(self.profile)
        return RegionStrategy(name, self.ranks, seconds, compute, spent.traffic, imbalance, (), note)


def _branches_on(rank: int, submeshes: Sequence[Submesh]) -> list[int]:
    """Numbers of the branches that run on a rank. ``submeshes``: those of the branches."""
    return [i for i, submesh in enumerate(submeshes) if submesh.start <= rank < submesh.stop]


def _mesh(data: int, tp: int) -> Mesh:
    return Mesh((("dp_replicate", data), ("tp", tp)))


def _meshes(submeshes: Sequence[Submesh]) -> str:
    """The meshes of the branches as text, like ``tp=2 | 1``; empty if every branch runs on one rank."""
    texts = [", ".join(f"{axis}={size}" for axis, size in submesh.mesh.axes if size > 1) for submesh in submeshes]
    return " | ".join(text or "1" for text in texts) if any(texts) else ""
