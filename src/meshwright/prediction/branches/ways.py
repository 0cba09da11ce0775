"""What a region of branches costs on G ranks: on one of them, by data, by tensor, or branches beside each other.

Everything is of one forward and backward of a microbatch on the rows of a data rank, without the optimizer. Branch i takes
cᵢ(g) seconds on g ranks: the fastest of dp × tp with at most g, predicted (work.py) or measured; what a job adds on the host
is beside it (``Profile.job_call``). Branches side by side take

    max cᵢ(gᵢ) + fork (backward: one all-reduce of gradients of what they were given) + join (forward: one all-to-all)
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
from meshwright.prediction.branches.work import Meter, Spent
from meshwright.regions import Fork, Join, Regions
from meshwright.submesh import Submesh, Submeshes

ONE, DATA, TENSOR, GIVEN, BEST = (
    "one device",
    "data parallel",
    "tensor parallel",
    "branches, as planned",
    "branches, best",
)

Cuts = Callable[[int], Mapping[str, Shard]]
"""Tensor-parallel ranks → the parameters that are cut over them."""


@dataclass(frozen=True)
class Branch:
    """One branch of a region.

    Attributes:
        name: the modules that it runs here.
        place: its number (place.py).
        positions: of its events.
        apart: whether data ranks can each run their own rows of it.
    """

    name: str
    place: int
    positions: tuple[int, ...]
    apart: bool


@dataclass(frozen=True)
class Region:
    """Branches between their forks and their join, on the ``ranks`` of the place around."""

    branches: tuple[Branch, ...]
    forks: tuple[Fork, ...]
    join: Join
    ranks: int

    @property
    def name(self) -> str:
        return " | ".join(b.name for b in self.branches)

    @property
    def positions(self) -> list[int]:
        return sorted(p for b in self.branches for p in b.positions)


def read_regions(
    regions: Regions, places: Submeshes, modules: Callable[[Sequence[int], int], str], apart: Callable[[int], bool]
) -> list[Region]:
    """The regions, in the order in which they run. Also those of one branch, which has its fork and join all the same.

    Args:
        modules: positions of a branch's events, and its place → its name.
        apart: a place → whether data ranks can each run their own rows of it.
    """
    listed = []
    for join in (m for m in regions.forks_and_joins if isinstance(m, Join)):
        inside: dict[int, list[int]] = {b: [] for b in join.branches}
        for p in range(join.first, join.position):
            at = regions.places[p]
            if at != join.around and join.around in places.chain(at):
                inside[places.child(at, join.around)].append(p)
        forks = tuple(
            m for m in regions.forks_and_joins
            if isinstance(m, Fork) and m.around == join.around and join.first <= m.position < join.position
        )  # fmt: skip
        branches = tuple(
            Branch(modules(positions, b), b, tuple(positions), apart(b)) for b, positions in inside.items()
        )
        listed.append(Region(branches, forks, join, places[join.around].tp))
    return listed


@dataclass(frozen=True)
class Way:
    """One way to run a region, and what it costs the rank that takes longest.

    Attributes:
        seconds: of a forward and backward, collectives included.
        compute: of them, what is no collective (measured tables: with those within branches).
        traffic: calls and bytes put in by a rank.
        imbalance: how many times longer computing takes than if all its ranks were busy all the time.
        split: ranks of each branch; empty where branches are not beside each other.
        crossing: of them, forks and joins, for each tp rank.
        note: what limits it.
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
class Cell:
    """A branch on some ranks: the fastest way found, and the mesh they form."""

    seconds: float
    spent: Spent
    mesh: Mesh


class RegionCost:
    """The ways of one region.

    Args:
        rows: of the batch that was recorded.
        cuts: over so many tensor-parallel ranks.
        tables: (branch's name, ranks) → seconds, measured, in place of predicted ones.
    """

    def __init__(
        self,
        region: Region,
        places: Submeshes,
        meter: Meter,
        rows: int | None,
        cuts: Cuts,
        tables: Mapping[tuple[str, int], float],
    ) -> None:
        self.region, self.places, self.meter, self.rows = region, places, meter, rows
        self.cuts, self.measured = cuts, tables
        self.profile = meter.profile

    @property
    def ranks(self) -> int:
        return self.region.ranks

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """For each branch, on 1, 2 … ranks."""
        return [self._cells(b) for b in self.region.branches]

    @cached_property
    def tables(self) -> list[list[float]]:
        """cᵢ(g) of each branch: with more ranks never slower, as some can do nothing."""
        return [monotone([cell.seconds for cell in cells]) for cells in self.cells]

    @cached_property
    def ways(self) -> list[Way]:
        """All of them, one device first."""
        ways = [self._one(), self._by_data(), self._by_tensor(), self._beside(GIVEN, self.places)]
        if len(self.region.branches) <= self.ranks:
            ways.append(self._best())
        return ways

    @property
    def parameter_bytes(self) -> tuple[int, int]:
        """Bytes of parameters that a rank gathers and reduces where data ranks shard them: branches as planned, and all
        branches on each rank, as FSDP of the whole has it.
        """
        gathered = [0] * self.ranks
        for b in self.region.branches:
            submesh = self.places[b.place]
            cuts = self.cuts(submesh.tp) if submesh.tp > 1 else {}
            nbytes = self._gathered(b.positions, cuts)
            for r in range(submesh.start, submesh.stop):
                gathered[r] += nbytes
        return max(gathered), self._gathered(self.region.positions, {})

    def _gathered(self, positions: Sequence[int], cuts: Mapping[str, Shard]) -> int:
        return self.meter.bytes(positions, cuts) + self.meter.reduced(positions, cuts)

    # --- a branch ---------------------------------------------------------------------------------------------------

    def _cells(self, branch: Branch) -> list[Cell]:
        cells: list[Cell] = []
        for ranks in range(1, self.ranks + 1):
            meshes = [_mesh(ranks // t, t) for t in range(1, ranks + 1) if ranks % t == 0]
            cell = min((self._cell(branch, mesh) for mesh in meshes), key=lambda c: c.seconds)
            if (seconds := self.measured.get((branch.name, ranks))) is not None:
                cell = Cell(seconds, Spent(seconds), cell.mesh)
            cells.append(cell)
        return cells

    def _cell(self, branch: Branch, mesh: Mesh) -> Cell:
        """A branch on a mesh that no other branch uses."""
        data, tp = mesh.axis_size("dp_replicate") * mesh.axis_size("dp_shard"), mesh.axis_size("tp")
        positions, cuts = list(branch.positions), self.cuts(tp) if tp > 1 else {}
        rows = self._share(data) if branch.apart else 1.0
        spent = self.meter.cut(positions, cuts, tp, rows) if tp > 1 else self.meter.whole(positions, rows)
        if data > 1:
            spent += Spent(traffic=all_reduce(self.meter.reduced(positions, cuts), data, tp))
        return Cell(spent.seconds(self.profile), spent, mesh)

    def _share(self, pieces: int) -> float:
        """The fraction of the rows on the rank that has most of them, if they are split over ``pieces`` ranks."""
        return 1.0 if self.rows is None else ceil(self.rows / pieces) / self.rows

    # --- ways -------------------------------------------------------------------------------------------------------

    @property
    def _alone(self) -> list[float]:
        return [cells[0].seconds for cells in self.cells]

    def _one(self) -> Way:
        return Way(ONE, 1, sum(self._alone), sum(self._alone))

    def _by_data(self) -> Way:
        ranks, region = self.ranks, self.region
        share, note = self._share(ranks), ""
        if not all(b.apart for b in region.branches):
            share, note = 1.0, "what a row gives depends on others: each rank runs all"
        elif self.rows is None or self.rows < ranks:
            note = f"{self.rows or 'no'} row{'s' * (self.rows != 1)}: {ranks - (self.rows or 1)} of {ranks} ranks have none"
        spent = self._by_tables(self.meter.whole(region.positions, share)) + self._added(region.positions)
        spent += Spent(traffic=all_reduce(self.meter.reduced(region.positions, {}), ranks))
        return self._way(DATA, spent, imbalance=share * ranks, note=note)

    def _by_tensor(self) -> Way:
        cuts = self.cuts(self.ranks) if self.ranks > 1 else {}
        spent = self._by_tables(self.meter.cut(self.region.positions, cuts, self.ranks))
        names = self.meter.names(self.region.positions)
        note = "" if any(n in cuts for n in names) else "no parameter of it can be cut"
        return self._way(TENSOR, spent + self._added(self.region.positions), note=note)

    def _by_tables(self, spent: Spent) -> Spent:
        """``spent`` times measured ÷ predicted seconds of all branches on one device. Without tables the factor is 1."""
        predicted = sum(self.meter.whole(b.positions).seconds(self.profile) for b in self.region.branches)
        measured = sum(self._alone) / max(predicted, 1e-30)
        return replace(spent, device=measured * spent.device, host=measured * spent.host)

    def _beside(self, name: str, places: Submeshes, cells: Sequence[Cell] | None = None) -> Way:
        """Branches at their places; ``cells``: the cost of each branch there."""
        plain = cells or [self._placed(b, places[b.place]) for b in self.region.branches]
        chosen = [self._in_job(b, c) for b, c in zip(self.region.branches, plain, strict=True)]
        on = [places[b.place] for b in self.region.branches]
        graph, region = self.meter.graph, self.region
        joined = join_traffic(graph, region.join, places, self.rows)
        forked = fork_traffic(graph, region.forks, region.join.around, places, self.rows)
        crossing = [fork + join for fork, join in zip(forked, joined, strict=True)]
        ranks = []
        for r, moved in enumerate(crossing):
            cells_on_rank = [c for c, p in zip(chosen, on, strict=True) if p.start <= r < p.stop]
            ranks.append(sum((c.spent for c in cells_on_rank), Spent(traffic=moved)))
        slowest = max(ranks, key=lambda s: s.seconds(self.profile))
        # All wait for the slowest branch, and then for the slowest part of the exchange.
        inner = max(sum(c.seconds for c, p in zip(chosen, on, strict=True) if p.start <= r < p.stop)
                    for r in range(self.ranks))  # fmt: skip
        seconds = inner + max(Spent(traffic=t).seconds(self.profile) for t in crossing)
        split = tuple(p.size for p in on)
        traffic = max((s.traffic for s in ranks), key=lambda t: (t.bytes, t.calls))
        return Way(
            name,
            self.ranks,
            seconds,
            slowest.compute(self.profile),
            traffic,
            self._rho(on),
            split,
            _meshes(on),
            tuple(crossing),
        )

    def _placed(self, branch: Branch, submesh: Submesh) -> Cell:
        cell = self._cell(branch, submesh.mesh)
        measured = self.measured.get((branch.name, submesh.size))
        return cell if measured is None else Cell(measured, Spent(measured), submesh.mesh)

    def _added(self, positions: Sequence[int]) -> Spent:
        """The seconds of the host that a job adds to these events."""
        return Spent(host=self.profile.job_call * len(positions))

    def _in_job(self, branch: Branch, cell: Cell) -> Cell:
        spent = cell.spent + self._added(branch.positions)
        return replace(cell, seconds=spent.seconds(self.profile), spent=spent)

    def _rho(self, on: Sequence[Submesh]) -> float:
        """max(cᵢ/gᵢ)·G/Σcᵢ. If a rank runs several branches, their cᵢ/gᵢ are added."""
        if all(p.stop <= q.start or q.stop <= p.start for i, p in enumerate(on) for q in on[:i]):
            idle = self.ranks / sum(p.size for p in on)
            return imbalance(self._alone, [p.size for p in on]) * idle
        loads = [sum(c / p.size for c, p in zip(self._alone, on, strict=True) if p.start <= r < p.stop)
                 for r in range(self.ranks)]  # fmt: skip
        return max(loads) * self.ranks / sum(self._alone)

    def _best(self) -> Way:
        in_job = [
            [self._in_job(b, c).seconds for c in branch_cells]
            for b, branch_cells in zip(self.region.branches, self.cells, strict=True)
        ]
        split = best_split(in_job, self.ranks)
        cells, all_, start = [], list(self.places.all), 0
        for branch, branch_cells, ranks in zip(self.region.branches, self.cells, split, strict=True):
            cell = branch_cells[ranks - 1]
            splits = branch.apart and cell.mesh.axis_size("dp_replicate") > 1
            all_[branch.place] = replace(
                all_[branch.place], on="", start=start, stop=start + ranks, mesh=cell.mesh, splits=splits
            )
            cells.append(cell)
            start += ranks
        way = self._beside(BEST, replace(self.places, all=tuple(all_)), cells)
        idle = self.ranks - sum(split)
        return replace(way, note=f"{way.note}; {idle} idle".removeprefix("; ")) if idle else way

    def _way(self, name: str, spent: Spent, *, imbalance: float = 1.0, note: str = "") -> Way:
        seconds, compute = spent.seconds(self.profile), spent.compute(self.profile)
        return Way(name, self.ranks, seconds, compute, spent.traffic, imbalance, (), note)


def _mesh(data: int, tp: int) -> Mesh:
    return Mesh((("dp_replicate", data), ("tp", tp)))


def _meshes(on: Sequence[Submesh]) -> str:
    """The meshes of the branches as text, like ``tp=2 | 1``; empty if every branch runs on one rank."""
    named = [", ".join(f"{a}={n}" for a, n in p.mesh.axes if n > 1) for p in on]
    return " | ".join(n or "1" for n in named) if any(named) else ""
