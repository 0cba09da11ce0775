"""``ShardMap``: which rank holds what of every parameter, as data. Facts before ink.

    recipe ──► ParameterFacts   a line a parameter: shape, layout on each axis, unit, reason, bytes
           ──► Row              the same, repeated blocks folded: model.layers.{0…31}.mlp.up_proj.weight ×32
           ──► slices, held_by  the exact ranges that a rank holds; the ranks that hold the same

Nothing here starts a process, holds a tensor or grows with parameters × ranks: what a rank holds is worked out
when it is asked for, so that a mesh of a thousand ranks is drawn as fast as one of four.
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
"""Up to so many ranks, everything is spelt out for each of them."""


def shard_map(recipe: Recipe, ranks: Iterable[int] | None = None) -> ShardMap:
    """Which rank holds what.

    Args:
        recipe: of a job (``job.recipe``), or of a plan alone (``make_recipe``).
        ranks: those whose slices `ShardMap.to_dict` spells out; default all of them where they are at most 64,
            none where they are more.

    Raises:
        ValueError: the mesh has no such rank.
    """
    if ranks is None:
        return ShardMap(recipe, tuple(range(recipe.mesh.size)) if recipe.mesh.size <= FEW_RANKS else ())
    chosen = tuple(dict.fromkeys(ranks))
    for rank in chosen:
        recipe.mesh.coordinate(rank)  # raises for one that is not there
    return ShardMap(recipe, chosen)


@dataclass(frozen=True)
class ShardMap:
    """Which rank holds what; see `shard_map`.

    Attributes:
        recipe: what it is the map of.
        ranks: those whose slices `to_dict` spells out.
    """

    recipe: Recipe
    ranks: tuple[int, ...]

    @property
    def mesh(self) -> Mesh:
        return self.recipe.mesh

    @cached_property
    def parameters(self) -> Mapping[str, ParameterFacts]:
        """The facts of every parameter by its first name, in the model's order."""
        return {line.name: facts_of(line, self.recipe) for line in self.recipe.parameters}

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The parameters, repeated blocks folded, in the model's order."""
        return fold(self.parameters.values())

    def matching(self, glob: str) -> tuple[Row, ...]:
        """The rows of the parameters whose name, or another name of theirs, fits a glob; a module's name will do.

        Raises:
            KeyError: none fits; the text names the nearest.
        """
        globs = (glob, f"{glob}.*")
        chosen = [
            facts
            for facts in self.parameters.values()
            if any(fnmatchcase(name, g) for name in (facts.name, *facts.aliases) for g in globs)
        ]
        if not chosen:
            raise KeyError(f"no parameter {glob!r}; the nearest: {', '.join(self.near(glob))}")
        return fold(chosen)

    def example(self, row: Row, rank: int) -> str:
        """A parameter of a row that a rank holds; the first, if it holds none of them."""
        return next((names[0] for names in row.by_stage.values() if self.holds(names[0], rank)), row.names[0])

    def near(self, glob: str) -> tuple[str, ...]:
        """The names of parameters that are spelt most like a glob; some of them, where none is near."""
        return nearest(glob, self.recipe.by_name) or tuple(self.parameters)[:3]

    def slices(self, name: str, rank: int) -> Slices:
        """What a rank holds of a parameter: for each dim, half-open ranges of the whole, in local order.

        Raises:
            KeyError: no such parameter.
            ValueError: no such rank.
        """
        return _slices(self.recipe.by_name[name], rank, self.recipe)

    def holds(self, name: str, rank: int) -> bool:
        """Whether a stage or branch on this rank uses the parameter: else it holds nothing of it."""
        return self.recipe.holds(self.recipe.by_name[name], rank)

    def held_by(self, name: str) -> tuple[tuple[tuple[int, ...], Slices], ...]:
        """(ranks, what each of them holds) for each distinct slice of a parameter, by first rank."""
        return _held_by(self.recipe.by_name[name], self.recipe)

    def bytes_at(self, rank: int) -> int:
        """Bytes of the parameters that a rank holds at rest: nothing gathered, no gradients, no optimizer."""
        return sum(count * _bytes_at(line, rank, self.recipe) for line, count in self._alike.items())

    @cached_property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """`bytes_at` every rank."""
        sizes = [0] * self.mesh.size
        for line, count in self._alike.items():
            held = self._bytes_of_trunk(line) if line.places == (0,) else self._bytes_of_branch(line)
            for rank, nbytes in held:
                sizes[rank] += count * nbytes
        return tuple(sizes)

    def _bytes_of_trunk(self, line: ParameterRecipe) -> Iterator[tuple[int, int]]:
        """(rank, bytes that it holds of a parameter): alike for each place of the pipeline, and worked out for the first."""
        cut = line.shape, line.dtype, line.tp, line.data
        if cut not in self._cuts:
            sizes = (elements(self.recipe.held(line, rank)) for rank in self._of_first_stage)
            self._cuts[cut] = [size * itemsize(line.dtype) for size in sizes]
        for pp in self.recipe.owners(line):
            offset = self.mesh.rank({"pp": pp}) if pp else 0
            for rank, nbytes in zip(self._of_first_stage, self._cuts[cut], strict=True):
                yield rank + offset, nbytes

    def _bytes_of_branch(self, line: ParameterRecipe) -> Iterator[tuple[int, int]]:
        for ranks, slices in _held_by(line, self.recipe):
            for rank in ranks:
                yield rank, elements(slices) * itemsize(line.dtype)

    @cached_property
    def _cuts(self) -> dict[Any, list[int]]:
        return {}

    @cached_property
    def _of_first_stage(self) -> list[int]:
        others = [axis for axis in self.mesh.names if axis != "pp"]
        return self.mesh.group_of(0, *others)

    @cached_property
    def bytes(self) -> int:
        """Of the whole model, each parameter once."""
        return sum(facts.bytes for facts in self.parameters.values())

    @cached_property
    def numel(self) -> int:
        """Elements of the whole model, each parameter once."""
        return sum(line.numel for line in self.recipe.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON takes.

        ``parameters[i]["held"]`` says for the chosen ``ranks`` who holds what: ``{"ranks": [0, 4], "slices":
        [[[0, 16]], [[0, 64]]]}`` are rows 0 to 16 and columns 0 to 64, on ranks 0 and 4.
        """
        lowest, highest = min(self.bytes_by_rank), max(self.bytes_by_rank)
        return {
            "mesh": dict(self.mesh.axes),
            "parameters": [{**facts.to_dict(), "held": self._held(name)} for name, facts in self.parameters.items()],
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
        """The places besides the trunk, each after its parent."""
        return tuple(branch_facts(number, self.recipe) for number in self.recipe.places.branches)

    def _repr_html_(self) -> str:
        import meshwright  # whose names load what draws

        return meshwright.html_of(self)

    def _held(self, name: str) -> list[dict[str, Any]]:
        together: dict[Slices, list[int]] = {}
        for rank in filter(lambda rank: self.holds(name, rank), self.ranks):
            together.setdefault(_or_nothing(self.slices(name, rank)), []).append(rank)
        return [
            {"ranks": ranks, "slices": [[list(r) for r in ranges] for ranges in slices]}
            for slices, ranks in together.items()
        ]

    @cached_property
    def _alike(self) -> Mapping[ParameterRecipe, int]:
        """One parameter of each kind that is cut alike, and how many there are."""
        kinds: dict[Any, list[ParameterRecipe]] = {}
        for line in self.recipe.parameters:
            kinds.setdefault((line.shape, line.dtype, line.tp, line.data, line.stages, line.places), []).append(line)
        return {lines[0]: len(lines) for lines in kinds.values()}


def _held_by(line: ParameterRecipe, recipe: Recipe) -> tuple[tuple[tuple[int, ...], Slices], ...]:
    if line.places != (0,):
        return _held_in_branches(line, recipe)
    layouts = recipe.layouts(line)
    copies = [axis for axis, layout in layouts.items() if axis != "pp" and not isinstance(layout, Shard)]
    together: dict[Slices, list[int]] = {}
    for group in recipe.mesh.groups(*copies):  # ranks that differ on axes which do not cut it hold the same
        if recipe.holds(line, group[0]):
            together.setdefault(_or_nothing(recipe.held(line, group[0])), []).extend(group)
    return tuple((tuple(sorted(ranks)), slices) for slices, ranks in together.items())


def _held_in_branches(line: ParameterRecipe, recipe: Recipe) -> tuple[tuple[tuple[int, ...], Slices], ...]:
    """The same of a parameter that a branch uses: not the mesh's groups hold the same, but its place's, so rank by rank."""
    alike: dict[tuple[int, int] | None, list[int]] = {}  # by where they stand on the axes that can cut it
    for rank in filter(lambda rank: recipe.holds(line, rank), range(recipe.mesh.size)):
        at = recipe.places.at(rank, line.place)
        alike.setdefault(None if at is None else (at.dp_shard, at.tp), []).append(rank)
    together: dict[Slices, list[int]] = {}
    for ranks in alike.values():
        together.setdefault(_or_nothing(recipe.held(line, ranks[0])), []).extend(ranks)
    return tuple((tuple(sorted(ranks)), slices) for slices, ranks in together.items())


def _bytes_at(line: ParameterRecipe, rank: int, recipe: Recipe) -> int:
    return elements(recipe.held(line, rank)) * itemsize(line.dtype) if recipe.holds(line, rank) else 0


def _slices(line: ParameterRecipe, rank: int, recipe: Recipe) -> Slices:
    return recipe.held(line, rank) if recipe.holds(line, rank) else ((),) * len(line.shape)


def _or_nothing(slices: Slices) -> Slices:
    """Ranks that hold nothing hold the same, whatever the ranges in the other dims are."""
    return slices if elements(slices) else ((),) * len(slices)
