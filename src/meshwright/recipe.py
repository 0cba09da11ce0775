"""``Recipe``: every decision about every parameter and module, with its reason. A frozen value; running only obeys it.

It names no process group and holds no tensor, so that a picture can be drawn of a run that no machine here could hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from meshwright.graph import Path
from meshwright.layout import REMOTE, REPLICATE, Interval, Layout, Replicate, Shard
from meshwright.mesh import Mesh
from meshwright.schedule import stage_ranks
from meshwright.submesh import Submesh, Submeshes, trunk

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class ParameterRecipe:
    """One parameter and where it lives.

    Attributes:
        name: as in ``named_parameters()`` of the model on one device.
        aliases: its other names, where it is tied.
        shape: of the whole parameter.
        dtype: as text, ``float32``.
        tp: its layout over ``tp``.
        data: over the data axes: ``shard`` (dim 0 over ``dp_shard``), ``replicate``, or ``loose`` (replicated, outside
            FSDP2, which takes no parameter without dims).
        unit: the wrap unit that gathers it, as a module name; empty for the root.
        stages: the pipeline stages that use it; a tied one may have several.
        places: where it is used: 0 is the trunk, others are branches; of several, each holds it whole.
        reason: why it is cut, or is not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    tp: Shard | Replicate = REPLICATE
    data: str = "shard"
    unit: str = ""
    stages: tuple[int, ...] = (0,)
    places: tuple[int, ...] = (0,)
    reason: str = ""

    @property
    def place(self) -> int:
        """The first place it is used in."""
        return self.places[0]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        """What a rank of the tp axis holds before data sharding."""
        if isinstance(self.tp, Replicate):
            return self.shape
        sizes = list(self.shape)
        sizes[self.tp.dim] = self.tp.local(tp_rank)
        return tuple(sizes)


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together (an FSDP2 wrap unit).

    Attributes:
        recompute: whether it is recomputed.
        place: its submesh.
        follows_inputs: whether FSDP2 follows the gradients of what it is given. It does so by a function of autograd on that,
            through which a model cannot write to a view of it; where it does not, gradients are reduced after the backward.
        follows_outputs: whether FSDP2 sees all that it gives. Otherwise it stays gathered from its forward to its backward.
    """

    name: str
    data: str = "shard"
    recompute: bool = False
    place: int = 0
    follows_inputs: bool = True
    follows_outputs: bool = True


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: an interval of the forward, from its first event to the next stage's.

    Attributes:
        index: in the order of the forward.
        first: the event it begins with: the call that it stands in, and which event of that call (see graph.py).
        where: the same for a person: ``layers.2``.
        modules: the modules that run wholly in it, outermost only.
        flops, moved: of its forward: operations, and bytes read and written; for the sample batch.
        work: what stages are balanced by: both, in operations.
        sends: bytes of the values that leave it, for the sample batch.
        parameters: elements it holds, over all ranks of it.
    """

    index: int
    first: tuple[Path, int]
    where: str
    modules: tuple[str, ...]
    flops: int
    moved: int
    work: int
    sends: int
    parameters: int


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs to know, and why.

    Attributes:
        mesh: the axes.
        parameters: in the model's order, each once.
        units: innermost first, the root last.
        recompute: modules whose activations are made again in backward.
        blocks: the layers of the model: modules that are repeated.
        sequence: modules whose first input is cut over dim 1 (the sequence) when sequence parallel is on.
        microbatches: pieces of a rank's rows, run one after another, gradients added up.
        precision: what is computed in; parameters and reductions stay as they are.
        rows: ``split`` | ``whole`` | ``auto``: whether data ranks run their own rows or all of them.
        stages: of a pipeline, in the order of the forward; empty without one.
        schedule: of a pipeline, by name.
        buffers: (name, the stage, the place whose copy counts) for each buffer of the model, where there are several.
        branches: the places that modules stand on besides the trunk, each after its parent; from 1 on, as places are
            numbered.
        streams: module → the stream of each rank that it runs on, at the same time as those on others.
        placed: module → the places of its calls, in turn, the last for all further ones.
        routed: whether the forward reads values, so that data ranks may use different parameters.
        kept: parameters of which the model uses the very object, from elsewhere than its modules: they stay those objects.
        shared_inputs: tensors of a batch, by name, that all rows share: they are not sharded by rows, whatever their size.
        nonfinite: ``stop`` | ``skip``: what training does where the loss or a gradient is not finite.
        verify: after how many steps ranks compare the values that they should hold alike; 0: never.
        eager: whether no block runs as a recorded program.
        compile: whether the compiler gets the programs of blocks.
        weights: what parameters begin with: ``drawn``, or what is loaded before the first step.
        notes: what a person should know: what was left whole, what was not found.
        plan: what it was made from, as YAML.
    """

    mesh: Mesh
    parameters: tuple[ParameterRecipe, ...]
    units: tuple[Unit, ...] = ()
    recompute: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    microbatches: int = 1
    precision: str = "float32"
    reshard_after_forward: bool = True
    rows: str = "auto"
    stages: tuple[Stage, ...] = ()
    schedule: str = "1f1b"
    buffers: tuple[tuple[str, int, int], ...] = ()
    branches: tuple[Submesh, ...] = ()
    placed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    routed: bool = False
    kept: tuple[str, ...] = ()
    shared_inputs: tuple[str, ...] = ()
    seed: int = 0
    nonfinite: str = "stop"
    verify: int = 100
    eager: bool = False
    compile: bool = False
    weights: str = "drawn"
    notes: tuple[str, ...] = ()
    plan: str = ""

    @property
    def in_parts(self) -> bool:
        """Whether ranks run parts of the model's forward: stages, branches, or blocks at the same time."""
        return bool(self.stages or self.branches or self.streams)

    @cached_property
    def by_name(self) -> Mapping[str, ParameterRecipe]:
        """Every name, tied ones too."""
        return {n: p for p in self.parameters for n in (p.name, *p.aliases)}

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        """The rank of the pipeline axis that each stage lives on."""
        return stage_ranks(self.mesh.axis_size("pp"), max(len(self.stages), 1))

    def stage_ranks_of(self, stage: int) -> list[int]:
        """The ranks that a stage lives on."""
        place = self.stage_rank[stage]
        return [rank for rank in range(self.mesh.size) if self.mesh.coordinate(rank).get("pp", 0) == place]

    @cached_property
    def places(self) -> Submeshes:
        """The trunk and the branches."""
        return Submeshes(self.mesh, (trunk(self.mesh), *self.branches))

    def holds(self, parameter: ParameterRecipe, rank: int) -> bool:
        """Whether a stage or branch on this rank uses the parameter."""
        if self.mesh.coordinate(rank).get("pp", 0) not in self.owners(parameter):
            return False
        return parameter.places == (0,) or any(self.places.at(rank, p) is not None for p in parameter.places)

    def held_by(self, rank: int) -> tuple[ParameterRecipe, ...]:
        """The parameters of which a rank holds something, in the order of the recipe."""
        return tuple(line for line in self.parameters if self.holds(line, rank))

    def owners(self, parameter: ParameterRecipe) -> tuple[int, ...]:
        """The ranks of the pipeline axis whose stages use the parameter, in order."""
        return tuple(sorted({self.stage_rank[s] for s in parameter.stages}))

    @cached_property
    def _buffers(self) -> Mapping[str, tuple[int, int]]:
        return {name: (stage, place) for name, stage, place in self.buffers}

    def owns_buffer(self, name: str, rank: int) -> bool:
        """Whether the stage and branch whose copy of a buffer counts is on this rank."""
        stage, place = self._buffers.get(name, (0, 0))
        here = self.places.at(rank, place)
        return here is not None and here.pp == self.stage_rank[stage]

    def buffer_place(self, name: str) -> int:
        """The place whose copy of a buffer counts."""
        return self._buffers.get(name, (0, 0))[1]

    def buffer_owner(self, name: str) -> int:
        """The first rank whose copy of a buffer is the one that the forward changes."""
        return next(rank for rank in range(self.mesh.size) if self.owns_buffer(name, rank))

    def shards(self, parameter: ParameterRecipe) -> int:
        """Over how many ranks FSDP2 shards a parameter."""
        return self.places.axis_size(parameter.place, "dp_shard") if parameter.data == "shard" else 1

    def layouts(self, parameter: ParameterRecipe) -> dict[str, Layout]:
        """The parameter's layout on each axis of the mesh; for a branch's, on the axes of its place."""
        layouts: dict[str, Layout] = {}
        at = self.places[parameter.place]
        for axis, size in self.mesh.axes:
            if axis == "pp":
                layouts[axis] = REPLICATE if len(self.owners(parameter)) == size else REMOTE
            elif axis == "tp":
                slices = ", ".join(self.places.spelled(p) for p in parameter.places if p)
                name = f"{axis} on {slices}" if slices and 0 not in parameter.places else axis
                layouts[name] = parameter.tp if at.tp > 1 else REPLICATE
            elif axis == "dp_shard" and self.shards(parameter) > 1:
                layouts[axis] = self._rows(parameter)
            else:
                layouts[axis] = REPLICATE
        if "dp_shard" not in layouts and self.shards(parameter) > 1:
            layouts["dp_shard"] = self._rows(parameter)
        return layouts

    def _rows(self, parameter: ParameterRecipe) -> Shard:
        size, rows = self.shards(parameter), parameter.local_shape(0)[0]
        step = -(-rows // size)
        return Shard(0, (tuple(max(0, min(step, rows - r * step)) for r in range(size)),))

    def held(self, parameter: ParameterRecipe, rank: int) -> Slices:
        """What a rank holds of a parameter at rest, if it `holds` it: per dim, ranges of the whole, in local order.

        Sharding over tp comes first, FSDP2 then shards what is left (``torch.chunk`` on dim 0): right to left, which
        DTensor writes as ``_StridedShard``.
        """
        ranges: list[tuple[Interval, ...]] = [((0, n),) if n else () for n in parameter.shape]
        place = self.places.at(rank, parameter.place)
        if place is None:  # of another of its places; all hold it whole
            return tuple(ranges)
        if isinstance(parameter.tp, Shard):
            ranges[parameter.tp.dim] = parameter.tp.intervals(place.tp)
        size = self.shards(parameter)
        if size > 1:
            rows = sum(stop - start for start, stop in ranges[0])
            step = -(-rows // size)
            first = place.dp_shard * step
            ranges[0] = _part(ranges[0], first, min(first + step, rows))
        return tuple(ranges)

    def held_shape(self, parameter: ParameterRecipe, rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds of a parameter at rest, if it `holds` it."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.held(parameter, rank))

    def holders(self, parameter: ParameterRecipe) -> int:
        """How many ranks hold a parameter, or a part of it."""
        if parameter.places == (0,):
            return self.mesh.size // self.mesh.axis_size("pp") * len(self.owners(parameter))
        return sum(self.holds(parameter, rank) for rank in range(self.mesh.size))

    def copies(self, parameter: ParameterRecipe) -> int:
        """How many ranks hold the same values of a parameter."""
        distinct = self.shards(parameter)
        if isinstance(parameter.tp, Shard):
            distinct *= parameter.tp.ranks
        return self.holders(parameter) // distinct

    def _repr_html_(self) -> str:
        import meshwright  # whose names load what draws

        return meshwright.html_of(self)

    def __iter__(self) -> Iterator[ParameterRecipe]:
        return iter(self.parameters)


def _part(ranges: tuple[Interval, ...], first: int, last: int) -> tuple[Interval, ...]:
    """Elements ``first`` to ``last`` of the concatenation of ``ranges``."""
    intervals, base = [], 0
    for start, stop in ranges:
        lo, hi = max(first - base, 0), min(last - base, stop - start)
        if lo < hi:
            intervals.append((start + lo, start + hi))
        base += stop - start
    return tuple(intervals)


def place_slices(whole: Tensor, slices: Slices, local: Tensor, dim: int = 0) -> None:
    """Writes ``local`` into ``whole`` where ``slices`` says; the inverse of ``take_slices``."""
    if dim == len(slices):
        whole.copy_(local)
        return
    base = 0
    for start, stop in slices[dim]:
        place_slices(whole.narrow(dim, start, stop - start), slices, local.narrow(dim, base, stop - start), dim + 1)
        base += stop - start


def take_slices(whole: Tensor, slices: Slices) -> Tensor:
    """The part of a whole tensor that ``slices`` names, as one tensor."""
    import torch  # words import torch only where tensors are at hand already

    out = whole
    for dim, ranges in enumerate(slices):
        parts = [out.narrow(dim, start, stop - start) for start, stop in ranges] or [out.narrow(dim, 0, 0)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return out
