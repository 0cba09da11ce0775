"""``Recipe``: every decision about every parameter and module, with its reason. A frozen value, which a run obeys.

It names no process group and holds no tensor, so that it can be drawn for a run that is too large for this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from meshwright.graph import Path
from meshwright.layout import REMOTE, REPLICATE, Interval, Layout, Replicate, Shard, chunked_shard
from meshwright.mesh import Mesh
from meshwright.schedule import stage_ranks
from meshwright.submesh import Submesh, Submeshes, trunk

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class ParameterRecipe:
    """The layout of one parameter. (A place is the number of a submesh: 0 is the trunk, the others are branches.)

    Attributes:
        name: as in ``named_parameters()`` of the model on one device.
        aliases: its other names, if it is tied.
        shape: the global shape.
        dtype: as text: ``float32``.
        tp: its layout over ``tp``.
        data: its layout over the data axes: ``shard`` (dim 0 over ``dp_shard``), ``replicate``, or ``loose`` (replicated
            without FSDP2, which accepts no parameter without dims).
        unit: the name of the module whose FSDP2 unit gathers it; empty for the root.
        stages: the pipeline stages that use it; a tied parameter may have several.
        places: the places that use it; if there are several, each holds the whole parameter.
        reason: why it is sharded, or is not.
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
        """The first place that uses it."""
        return self.places[0]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        """The shape on a rank of the tp axis, before it is sharded over the data axes."""
        if isinstance(self.tp, Replicate):
            return self.shape
        sizes = list(self.shape)
        sizes[self.tp.dim] = self.tp.local(tp_rank)
        return tuple(sizes)


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together (an FSDP2 unit).

    Attributes:
        name: the name of the module; empty for the root.
        data: ``shard`` or ``replicate``, over the data axes.
        recompute: whether it is recomputed in the backward.
        place: its place (see ``ParameterRecipe``).
        follows_inputs: whether FSDP2 puts an autograd Function on the inputs of the module, which tells it that the backward of
            the unit is over. A model cannot write to a view through such a Function. If false, gradients are reduced after
            the whole backward.
        follows_outputs: whether FSDP2 sees all outputs of the module. If false, the unit stays gathered from its forward to its
            backward.
    """

    name: str
    data: str = "shard"
    recompute: bool = False
    place: int = 0
    follows_inputs: bool = True
    follows_outputs: bool = True


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: an interval of the forward, from its first event to the first event of the next stage.

    Attributes:
        index: its number in the order of the forward.
        first: its first event: (path of the call, index of the event in that call), see graph.py.
        where: the first event for a person: ``layers.2``.
        modules: the modules that run wholly in it, outermost only.
        flops, moved: floating-point operations, and bytes read and written, of its forward on the sample batch.
        work: the cost by which stages are balanced: both of these, in operations.
        sends: bytes of the values that it sends, for the sample batch.
        parameters: the number of elements of its parameters, over all its ranks.
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
    """Every decision of a run. (A place is the number of a submesh: 0 is the trunk, the others are branches.)

    Attributes:
        mesh: the axes and their sizes.
        parameters: each parameter once, in the model's order.
        units: the FSDP2 units, innermost first, the root last.
        recompute: the modules that are recomputed in the backward.
        blocks: the layers of the model: modules that are repeated.
        sequence: the modules whose first input is sharded over dim 1 (the sequence), with sequence parallelism.
        microbatches: the number of pieces of a rank's rows, which run one after another; their gradients add up.
        precision: the dtype of the computation; parameters and reductions keep theirs.
        rows: ``split`` | ``whole`` | ``auto``: whether data ranks run their own rows or all rows.
        stages: the stages of a pipeline, in the order of the forward; empty without a pipeline.
        schedule: the name of the pipeline's schedule.
        buffers: (name, stage, place) for each buffer of which there are several copies: which copy counts.
        branches: the submeshes of the branches, each after its parent; the first has place 1.
        streams: module → the stream of each rank on which it runs, at the same time as modules on other streams.
        placed: module → the places of its calls, in order; the last one is for all further calls.
        routed: whether Python reads values in the forward, so that data ranks may use different parameters.
        referenced_outside: parameters that the model also holds outside its modules: they stay the same objects.
        shared_inputs: names of tensors of a batch that all rows share: they are not divided by rows, whatever their size.
        nonfinite: ``stop`` | ``skip``: what training does if the loss or a gradient is not finite.
        verify: after how many steps ranks compare the values that should be equal on them; 0: never.
        eager: whether no block runs as a recorded program.
        compile: whether the programs of blocks are compiled.
        weights: the initial values of parameters: ``drawn``, or loaded before the first step.
        notes: what a person should know: modules that were not sharded, names that were not found.
        plan: the plan from which it was made, as YAML.
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
    referenced_outside: tuple[str, ...] = ()
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
        """Whether ranks run parts of the model's forward: stages, branches, or concurrent blocks."""
        return bool(self.stages or self.branches or self.streams)

    @cached_property
    def by_name(self) -> Mapping[str, ParameterRecipe]:
        """Name → parameter, for all names, including those of tied parameters."""
        return {n: p for p in self.parameters for n in (p.name, *p.aliases)}

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        """For each stage, its rank of the pipeline axis."""
        return stage_ranks(self.mesh.axis_size("pp"), max(len(self.stages), 1))

    def stage_ranks_of(self, stage: int) -> list[int]:
        """The ranks of a stage."""
        pp_rank = self.stage_rank[stage]
        return [rank for rank in range(self.mesh.size) if self.mesh.coordinate(rank).get("pp", 0) == pp_rank]

    @cached_property
    def places(self) -> Submeshes:
        """The submeshes of the trunk and the branches, by place."""
        return Submeshes(self.mesh, (trunk(self.mesh), *self.branches))

    def holds(self, parameter: ParameterRecipe, rank: int) -> bool:
        """Whether a stage or branch on this rank uses the parameter."""
        if self.mesh.coordinate(rank).get("pp", 0) not in self.owners(parameter):
            return False
        return parameter.places == (0,) or any(self.places.at(rank, p) is not None for p in parameter.places)

    def held_by(self, rank: int) -> tuple[ParameterRecipe, ...]:
        """The parameters that a rank holds in part or whole, in the order of the recipe."""
        return tuple(parameter for parameter in self.parameters if self.holds(parameter, rank))

    def owners(self, parameter: ParameterRecipe) -> tuple[int, ...]:
        """The ranks of the pipeline axis whose stages use the parameter, in order."""
        return tuple(sorted({self.stage_rank[s] for s in parameter.stages}))

    @cached_property
    def _buffers(self) -> Mapping[str, tuple[int, int]]:
        return {name: (stage, place) for name, stage, place in self.buffers}

    def owns_buffer(self, name: str, rank: int) -> bool:
        """Whether the rank belongs to the stage and place whose copy of a buffer counts."""
        stage, place = self._buffers.get(name, (0, 0))
        coordinate = self.places.at(rank, place)
        return coordinate is not None and coordinate.pp == self.stage_rank[stage]

    def buffer_place(self, name: str) -> int:
        """The place whose copy of a buffer counts."""
        return self._buffers.get(name, (0, 0))[1]

    def buffer_owner(self, name: str) -> int:
        """The first rank whose copy of a buffer counts: the forward changes it there."""
        return next(rank for rank in range(self.mesh.size) if self.owns_buffer(name, rank))

    def shards(self, parameter: ParameterRecipe) -> int:
        """The number of ranks over which FSDP2 shards a parameter."""
        return self.places.axis_size(parameter.place, "dp_shard") if parameter.data == "shard" else 1

    def layouts(self, parameter: ParameterRecipe) -> dict[str, Layout]:
        """Axis → the parameter's layout; for a parameter of a branch, on the axes of its place."""
        layouts: dict[str, Layout] = {}
        submesh = self.places[parameter.place]
        for axis, size in self.mesh.axes:
            if axis == "pp":
                layouts[axis] = REPLICATE if len(self.owners(parameter)) == size else REMOTE
            elif axis == "tp":
                slices = ", ".join(self.places.spelled(p) for p in parameter.places if p)
                name = f"{axis} on {slices}" if slices and 0 not in parameter.places else axis
                layouts[name] = parameter.tp if submesh.tp > 1 else REPLICATE
            elif axis == "dp_shard" and self.shards(parameter) > 1:
                layouts[axis] = self._fsdp_layout(parameter)
            else:
                layouts[axis] = REPLICATE
        if "dp_shard" not in layouts and self.shards(parameter) > 1:
            layouts["dp_shard"] = self._fsdp_layout(parameter)
        return layouts

    def _fsdp_layout(self, parameter: ParameterRecipe) -> Shard:
        """How FSDP2 shards dim 0 of the local part of tp rank 0."""
        return chunked_shard(0, parameter.local_shape(0)[0], self.shards(parameter))

    def held(self, parameter: ParameterRecipe, rank: int) -> Slices:
        """The part of a parameter at rest on a rank that `holds` it: for each dim, ranges of the whole dim, in local order.

        A parameter is first sharded over tp; then FSDP2 shards dim 0 of the local part (as ``torch.chunk``). DTensor writes
        this right-to-left order as ``_StridedShard``.
        """
        ranges: list[tuple[Interval, ...]] = [((0, n),) if n else () for n in parameter.shape]
        coordinate = self.places.at(rank, parameter.place)
        if coordinate is None:  # the rank belongs to another place that uses the parameter; all of them hold it whole
            return tuple(ranges)
        if isinstance(parameter.tp, Shard):
            ranges[parameter.tp.dim] = parameter.tp.intervals(coordinate.tp)
        size = self.shards(parameter)
        if size > 1:
            ranges[0] = chunk_of(ranges[0], size, coordinate.dp_shard)
        return tuple(ranges)

    def held_shape(self, parameter: ParameterRecipe, rank: int) -> tuple[int, ...]:
        """The shape of the part of a parameter at rest on a rank that `holds` it."""
        return shape_of(self.held(parameter, rank))

    def holders(self, parameter: ParameterRecipe) -> int:
        """The number of ranks that hold a parameter, or a part of it."""
        if parameter.places == (0,):
            return self.mesh.size // self.mesh.axis_size("pp") * len(self.owners(parameter))
        return sum(self.holds(parameter, rank) for rank in range(self.mesh.size))

    def copies(self, parameter: ParameterRecipe) -> int:
        """The number of ranks that hold the same values of a parameter."""
        distinct = self.shards(parameter)
        if isinstance(parameter.tp, Shard):
            distinct *= parameter.tp.ranks
        return self.holders(parameter) // distinct

    def _repr_html_(self) -> str:
        import meshwright  # its names import what they need

        return meshwright.html_of(self)

    def __iter__(self) -> Iterator[ParameterRecipe]:
        return iter(self.parameters)


def chunk_of(ranges: tuple[Interval, ...], chunks: int, index: int) -> tuple[Interval, ...]:
    """One of ``chunks`` parts, as ``torch.chunk`` divides, of the concatenation of ``ranges``."""
    elements = sum(stop - start for start, stop in ranges)
    step = -(-elements // chunks)
    first, last = index * step, min((index + 1) * step, elements)
    intervals, base = [], 0
    for start, stop in ranges:
        lo, hi = max(first - base, 0), min(last - base, stop - start)
        if lo < hi:
            intervals.append((start + lo, start + hi))
        base += stop - start
    return tuple(intervals)


def shape_of(slices: Slices) -> tuple[int, ...]:
    """The shape of the part that slices name."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in slices)


def place_slices(full: Tensor, slices: Slices, local: Tensor, dim: int = 0) -> None:
    """Writes ``local`` to the part of a full tensor that ``slices`` names; the inverse of ``take_slices``."""
    if dim == len(slices):
        full.copy_(local)
        return
    base = 0
    for start, stop in slices[dim]:
        place_slices(full.narrow(dim, start, stop - start), slices, local.narrow(dim, base, stop - start), dim + 1)
        base += stop - start


def take_slices(full: Tensor, slices: Slices) -> Tensor:
    """The part of a full tensor that ``slices`` names, as one tensor."""
    import torch  # imported only if there are tensors: a recipe alone needs no torch

    out = full
    for dim, ranges in enumerate(slices):
        parts = [out.narrow(dim, start, stop - start) for start, stop in ranges] or [out.narrow(dim, 0, 0)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return out
