"""``ShardMap``: which rank holds which part of every parameter, as data.

    recipe ──► ParameterFacts   of each parameter: shape, layout on each axis, unit, reason, bytes
           ──► Row              parameters of repeated blocks, folded: model.layers.{0…31}.mlp.up_proj.weight ×32
           ──► slices, held_by  the exact ranges that a rank holds; the ranks that hold the same ranges

No process is started, no tensor is made, and no value grows with parameters × ranks: slices are computed when they are asked
for. So a mesh of a thousand ranks is drawn as fast as one of four.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from meshwright.draw.branch_facts import BranchFacts, branch_facts
from meshwright.draw.parameters import ParameterFacts, Row, elements, facts_of, fold, itemsize
from meshwright.errors import nearest
from meshwright.layout import Shard
from meshwright.mesh import Mesh
from meshwright.recipe import ParameterRecipe, Recipe, Slices

FEW_RANKS = 64
"""Up to this many ranks, the slices of each rank are listed: more do not fit a screen."""


def shard_map(recipe: Recipe, ranks: Iterable[int] | None = None) -> ShardMap:
    """The shard map of a recipe: which rank holds which part of each parameter.

    Args:
        recipe: of a job (``job.recipe``), or of a plan alone (``make_recipe``).
        ranks: whose slices `ShardMap.to_dict` lists. Default: all if there are at most 64, else none.

    Raises:
        ValueError: the mesh has no such rank.
    """
    if ranks is None:
        return ShardMap(recipe, tuple(range(recipe.mesh.size)) if recipe.mesh.size <= FEW_RANKS else ())
    unique_ranks = tuple(dict.fromkeys(ranks))
    for rank in unique_ranks:
        recipe.mesh.coordinate(rank)  # raises ValueError for an unknown rank
    return ShardMap(recipe, unique_ranks)


_SUGGESTIONS = 3  # names that an error shows if none is similar


@dataclass(frozen=True)
class ShardMap:
    """Which rank holds which part of each parameter; see `shard_map`.

    Attributes:
        recipe: every decision of the plan.
        ranks: whose slices `to_dict` lists.
    """

    recipe: Recipe
    ranks: tuple[int, ...]

    @property
    def mesh(self) -> Mesh:
        return self.recipe.mesh

    @cached_property
    def parameters(self) -> Mapping[str, ParameterFacts]:
        """First name → facts of the parameter, in the model's order."""
        return {line.name: facts_of(line, self.recipe) for line in self.recipe.parameters}

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The parameters with repeated blocks folded, in the model's order."""
        return fold(self.parameters.values())

    def matching(self, glob: str) -> tuple[Row, ...]:
        """The rows of the parameters of which a name matches a glob. The name of a module matches all of its parameters.

        Raises:
            KeyError: no parameter matches. The text has the most similar names.
        """
        globs = (glob, f"{glob}.*")
        matching = [
            facts
            for facts in self.parameters.values()
            if any(fnmatchcase(name, g) for name in (facts.name, *facts.aliases) for g in globs)
        ]
        if not matching:
            raise KeyError(f"no parameter {glob!r}; the nearest: {', '.join(self.near(glob))}")
        return fold(matching)

    def example(self, row: Row, rank: int) -> str:
        """The name of a parameter of a row that a rank holds; of the first one, if it holds none."""
        return next((names[0] for names in row.by_stage.values() if self.holds(names[0], rank)), row.names[0])

    def near(self, glob: str) -> tuple[str, ...]:
        """The names of parameters that are most similar to a glob; if none is, the first ones."""
        return nearest(glob, self.recipe.by_name) or tuple(self.parameters)[:_SUGGESTIONS]

    def slices(self, name: str, rank: int) -> Slices:
        """The part of a parameter that a rank holds: for each dim, half-open ranges of the whole, in local order.

        Raises:
            KeyError: no such parameter.
            ValueError: no such rank.
        """
        return _slices(self.recipe.by_name[name], rank, self.recipe)

    def holds(self, name: str, rank: int) -> bool:
        """Whether a stage or branch on this rank uses the parameter. If not, the rank holds no part of it."""
        return self.recipe.holds(self.recipe.by_name[name], rank)

    def held_by(self, name: str) -> tuple[tuple[tuple[int, ...], Slices], ...]:
        """(ranks, slices that each of them holds), for each distinct part of a parameter, in the order of first ranks."""
        return _held_by(self.recipe.by_name[name], self.recipe)

    def bytes_at(self, rank: int) -> int:
        """Bytes of a rank's parameters at rest, without gathered units, gradients and optimizer state."""
        return sum(count * _bytes_at(line, rank, self.recipe) for line, count in self._kinds.items())

    @cached_property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """`bytes_at` of every rank, in rank order."""
        sizes = [0] * self.mesh.size
        for line, count in self._kinds.items():
            bytes_of_ranks = self._bytes_in_trunk(line) if line.places == (0,) else self._bytes_in_branches(line)
            for rank, nbytes in bytes_of_ranks:
                sizes[rank] += count * nbytes
        return tuple(sizes)

    def _bytes_in_trunk(self, line: ParameterRecipe) -> Iterator[tuple[int, int]]:
        """(rank, bytes that it holds of a parameter). Computed for the first pp rank, as others divide it in the same way."""
        layout = line.shape, line.dtype, line.tp, line.data
        if layout not in self._bytes_by_layout:
            sizes = (elements(self.recipe.held(line, rank)) for rank in self._first_pp_ranks)
            self._bytes_by_layout[layout] = [size * itemsize(line.dtype) for size in sizes]
        for pp in self.recipe.owners(line):
            offset = self.mesh.rank({"pp": pp}) if pp else 0
            for rank, nbytes in zip(self._first_pp_ranks, self._bytes_by_layout[layout], strict=True):
                yield rank + offset, nbytes

    def _bytes_in_branches(self, line: ParameterRecipe) -> Iterator[tuple[int, int]]:
        """(rank, bytes that it holds of a parameter that a branch uses)."""
        for ranks, slices in _held_by(line, self.recipe):
            for rank in ranks:
                yield rank, elements(slices) * itemsize(line.dtype)

    @cached_property
    def _bytes_by_layout(self) -> dict[Any, list[int]]:
        """(shape, dtype, tp, data) → bytes on each of the ranks with pp index 0."""
        return {}

    @cached_property
    def _first_pp_ranks(self) -> list[int]:
        """The ranks with index 0 on the pipeline axis."""
        others = [axis for axis in self.mesh.names if axis != "pp"]
        return self.mesh.group_of(0, *others)

    @cached_property
    def bytes(self) -> int:
        """Size of the whole model, each parameter counted once."""
        return sum(facts.bytes for facts in self.parameters.values())

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole model, each parameter counted once."""
        return sum(line.numel for line in self.recipe.parameters)

    def to_dict(self) -> dict[str, Any]:
        """All facts as plain values, for JSON.

        ``parameters[i]["held"]`` lists the slices of the chosen ``ranks``: ``{"ranks": [0, 4], "slices": [[[0, 16]],
        [[0, 64]]]}`` are rows 0 to 16 and columns 0 to 64, on ranks 0 and 4.
        """
        lowest, highest = min(self.bytes_by_rank), max(self.bytes_by_rank)
        return {
            "mesh": dict(self.mesh.axes),
            "parameters": [
                {**facts.to_dict(), "held": self._slices_by_ranks(name)} for name, facts in self.parameters.items()
            ],
            "numel": self.numel,
            "bytes": self.bytes,
            "bytes_per_rank": {"least": lowest, "most": highest, "of": {r: self.bytes_by_rank[r] for r in self.ranks}},
            "stages": [
                {**asdict(stage), "ranks": self.recipe.stage_ranks_of(stage.index)} for stage in self.recipe.stages
            ],
            "branches": [facts.to_dict() for facts in self.branches],
            "streams": dict(self.recipe.streams),
            "units": [unit.name for unit in self.recipe.units],
            "notes": list(self.recipe.notes),
        }

    @cached_property
    def branches(self) -> tuple[BranchFacts, ...]:
        """The facts of all branches, each after its parent."""
        return tuple(branch_facts(number, self.recipe) for number in self.recipe.places.branches)

    def _repr_html_(self) -> str:
        import meshwright  # its names import the drawing code when they are used

        return meshwright.html_of(self)

    def _slices_by_ranks(self, name: str) -> list[dict[str, Any]]:
        """The slices of the chosen ranks. See `to_dict`."""
        ranks_by_slices: dict[Slices, list[int]] = {}
        for rank in filter(lambda rank: self.holds(name, rank), self.ranks):
            ranks_by_slices.setdefault(_normalized(self.slices(name, rank)), []).append(rank)
        return [
            {"ranks": ranks, "slices": [[list(r) for r in ranges] for ranges in slices]}
            for slices, ranks in ranks_by_slices.items()
        ]

    @cached_property
    def _kinds(self) -> Mapping[ParameterRecipe, int]:
        """The first parameter of each kind (equal shape, dtype, layout, stages and submeshes) → number of its kind."""
        kinds: dict[Any, list[ParameterRecipe]] = {}
        for line in self.recipe.parameters:
            kinds.setdefault((line.shape, line.dtype, line.tp, line.data, line.stages, line.places), []).append(line)
        return {lines[0]: len(lines) for lines in kinds.values()}


def _held_by(line: ParameterRecipe, recipe: Recipe) -> tuple[tuple[tuple[int, ...], Slices], ...]:
    """See `ShardMap.held_by`."""
    if line.places != (0,):
        return _held_in_branches(line, recipe)
    layouts = recipe.layouts(line)
    copies = [axis for axis, layout in layouts.items() if axis != "pp" and not isinstance(layout, Shard)]
    ranks_by_slices: dict[Slices, list[int]] = {}
    for group in recipe.mesh.groups(*copies):  # the ranks of a group of these axes hold equal slices
        if recipe.holds(line, group[0]):
            ranks_by_slices.setdefault(_normalized(recipe.held(line, group[0])), []).extend(group)
    return tuple((tuple(sorted(ranks)), slices) for slices, ranks in ranks_by_slices.items())


def _held_in_branches(line: ParameterRecipe, recipe: Recipe) -> tuple[tuple[tuple[int, ...], Slices], ...]:
    """`ShardMap.held_by` for a parameter that a branch uses. Rank by rank, as groups of the mesh are not those of a submesh."""
    by_coordinate: dict[tuple[int, int] | None, list[int]] = {}  # (dp_shard, tp) in the submesh → ranks
    for rank in filter(lambda rank: recipe.holds(line, rank), range(recipe.mesh.size)):
        coordinate = recipe.places.at(rank, line.place)
        key = None if coordinate is None else (coordinate.dp_shard, coordinate.tp)
        by_coordinate.setdefault(key, []).append(rank)
    ranks_by_slices: dict[Slices, list[int]] = {}
    for ranks in by_coordinate.values():
        ranks_by_slices.setdefault(_normalized(recipe.held(line, ranks[0])), []).extend(ranks)
    return tuple((tuple(sorted(ranks)), slices) for slices, ranks in ranks_by_slices.items())


def _bytes_at(line: ParameterRecipe, rank: int, recipe: Recipe) -> int:
    return elements(recipe.held(line, rank)) * itemsize(line.dtype) if recipe.holds(line, rank) else 0


def _slices(line: ParameterRecipe, rank: int, recipe: Recipe) -> Slices:
    return recipe.held(line, rank) if recipe.holds(line, rank) else ((),) * len(line.shape)


def _normalized(slices: Slices) -> Slices:
    """Slices without elements become empty in every dim, so that all ranks that hold nothing have equal slices."""
    return slices if elements(slices) else ((),) * len(slices)
