"""``ShardMap``: which rank holds what of every parameter, as data. Facts before ink.

    recipe ──► ParameterFacts   a line a parameter: shape, layout on each axis, unit, reason, bytes
           ──► Row              the same, repeated blocks folded: model.layers.{0…31}.mlp.up_proj.weight ×32
           ──► slices, held_by  the exact ranges that a rank holds; the ranks that hold the same

Nothing here starts a process, holds a tensor or grows with parameters × ranks: what a rank holds is worked out
when it is asked for, so that a mesh of a thousand ranks is drawn as fast as one of four.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

from meshwright.errors import nearest
from meshwright.layout import REPLICATE, Layout, Shard
from meshwright.mesh import Mesh
from meshwright.names import fold_alike, pattern
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
class ParameterFacts:
    """One parameter.

    Attributes:
        name, aliases: all its names; tied ones are aliases.
        shape, dtype: of the whole parameter.
        layout: on each axis of the mesh, in mesh order.
        unit: the module whose parameters are gathered with it; empty for the root.
        reason: why it is cut as it is, or left whole.
        bytes: of the whole parameter.
        requires_grad: whether it is trained.
        stages: the pipeline stages that use it; without a pipeline stage 0.
        places: where it is used: 0 is the trunk, others are branches, as `Recipe.branches` numbers them from 1 on.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Mapping[str, Layout]
    unit: str
    reason: str
    bytes: int
    requires_grad: bool
    stages: tuple[int, ...] = (0,)
    places: tuple[int, ...] = (0,)

    def on_axis(self, axis: str) -> Layout:
        """The layout on an axis; of a parameter of a branch, on that axis of its place."""
        return next((layout for name, layout in self.layout.items() if name.split(" ")[0] == axis), REPLICATE)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; layouts as words."""
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": {axis: str(layout) for axis, layout in self.layout.items()},
            "unit": self.unit,
            "reason": self.reason,
            "bytes": self.bytes,
            "requires_grad": self.requires_grad,
            "stages": list(self.stages),
            "places": list(self.places),
        }


@dataclass(frozen=True)
class BranchFacts:
    """A branch: one place of modules besides the trunk.

    Attributes:
        number: as `ParameterFacts.places` has it.
        on: the slice, as the plan says it; of a nested branch ``tp[0] of tp[0:3]``.
        parent: the number of the place around it; 0 is the trunk.
        ranks: all ranks that run it, also those with other rows of the batch.
        mesh: the axes that the ranks of one slice form.
        modules: what the plan places there: (name, its turns: which of its calls run there, from 0; empty for all).
        splits: whether the data ranks of its own mesh each run their share of the rows; else each runs all.
        numel: elements of the parameters that are used there, each once.
        work: of all its ranks, as a share of that of all branches of its parent; 0 to 1.
        load: work of one of its ranks, as a share of that of the busiest rank of these.
    """

    number: int
    on: str
    parent: int
    ranks: tuple[int, ...]
    mesh: Mesh
    modules: tuple[tuple[str, tuple[int, ...]], ...]
    splits: bool
    numel: int
    work: float
    load: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "number": self.number,
            "on": self.on,
            "parent": self.parent,
            "ranks": list(self.ranks),
            "mesh": dict(self.mesh.axes),
            "modules": [{"name": name, "calls": list(turns)} for name, turns in self.modules],
            "splits": self.splits,
            "numel": self.numel,
            "work": round(self.work, 4),
            "load": round(self.load, 4),
        }


@dataclass(frozen=True)
class Row:
    """Parameters that differ in nothing but the numbers in their names.

    Attributes:
        label: their name, with the ranges of the numbers: ``model.layers.{0…31}.mlp.up_proj.weight``.
        names: all of them, in the model's order.
        first: the facts of the first, which are those of all, but for the stage.
        by_stage: stages of a pipeline → the names that these stages use.
    """

    label: str
    names: tuple[str, ...]
    first: ParameterFacts
    by_stage: Mapping[tuple[int, ...], tuple[str, ...]]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def bytes(self) -> int:
        """Of all of them together."""
        return self.count * self.first.bytes

    def __str__(self) -> str:
        return self.label if self.count == 1 else f"{self.label} ×{self.count}"


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
        return {line.name: _facts(line, self.recipe) for line in self.recipe.parameters}

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
        return tuple(_branch(number, self.recipe) for number in self.recipe.places.branches)

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


# --- one parameter ----------------------------------------------------------------------------------------------------


def _facts(line: ParameterRecipe, recipe: Recipe) -> ParameterFacts:
    return ParameterFacts(
        name=line.name,
        aliases=line.aliases,
        shape=line.shape,
        dtype=line.dtype,
        layout=recipe.layouts(line),
        unit=line.unit,
        reason=line.reason,
        bytes=line.numel * itemsize(line.dtype),
        requires_grad=line.requires_grad,
        stages=line.stages,
        places=line.places,
    )


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


def elements(slices: Slices) -> int:
    """How many elements the ranges hold."""
    return prod(sum(stop - start for start, stop in ranges) for ranges in slices)


def itemsize(dtype: str) -> int:
    """Bytes of an element: of ``float32`` 4, of ``float8_e4m3fn`` 1, of ``bool`` 1."""
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _branch(number: int, recipe: Recipe) -> BranchFacts:
    place, turns = recipe.places[number], recipe.placed
    here = {name: tuple(i for i, p in enumerate(turns[name]) if p == number) for name in dict.fromkeys(place.modules)}
    used = [line for line in recipe.parameters if number in line.places]
    owners = {pp for line in used for pp in recipe.owners(line)}  # of the pipeline; without parameters any
    coordinates = ((rank, recipe.places.at(rank, number)) for rank in range(recipe.mesh.size))
    beside = [p for p in recipe.branches if p.parent == place.parent]
    return BranchFacts(
        number=number,
        on=recipe.places.spelled(number),
        parent=place.parent,
        ranks=tuple(rank for rank, at in coordinates if at is not None and (not owners or at.pp in owners)),
        mesh=place.mesh,
        modules=tuple((name, calls if set(turns[name]) != {number} else ()) for name, calls in here.items()),
        splits=place.splits,
        numel=sum(line.numel for line in used),
        work=place.work / max(1, sum(p.work for p in beside)),
        load=place.load / max(1.0, *(p.load for p in beside)),
    )


# --- folding ----------------------------------------------------------------------------------------------------------


def fold(parameters: Iterable[ParameterFacts]) -> tuple[Row, ...]:
    """Parameters whose names differ in whole numbers only, and that are alike in all else, as one row each.

    Numbers are folded only where every combination is there: the label then says exactly which names it stands for.
    """
    order: dict[str, int] = {}
    kinds: dict[Any, list[ParameterFacts]] = {}
    for facts in parameters:
        order[facts.name] = len(order)
        kinds.setdefault(_kind(facts), []).append(facts)
    rows = [row for kind in kinds.values() for row in _rows(kind)]
    return tuple(sorted(rows, key=lambda row: order[row.names[0]]))


def _kind(facts: ParameterFacts) -> Any:
    """What parameters of one row share."""
    names = tuple(pattern(name) for name in (facts.name, *facts.aliases))
    layout = tuple(facts.layout.values())
    return (
        names,
        pattern(facts.unit),
        facts.shape,
        facts.dtype,
        layout,
        facts.reason,
        facts.requires_grad,
        facts.stages if len(facts.stages) > 1 else (),  # stages that do the same are told once
        facts.places,
    )


def _rows(alike: list[ParameterFacts]) -> list[Row]:
    facts = {f.name: f for f in alike}
    rows = []
    for folded in fold_alike(list(facts)):
        by_stage: dict[tuple[int, ...], list[str]] = {}
        for name in folded.names:
            by_stage.setdefault(facts[name].stages, []).append(name)
        stages = {stages: tuple(names) for stages, names in by_stage.items()}
        rows.append(Row(folded.label, folded.names, facts[folded.names[0]], stages))
    return rows
