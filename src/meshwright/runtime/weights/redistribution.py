"""``redistribute_by_recipe``: what DTensor gathers and divides over tp has the order and the shares of the recipe.

DTensor's ``Shard`` means: rank r holds the r-th chunk. A fused parameter (q, k and v one after another) is sharded block by
block, and three heads over two ranks are two and one. In torch ``p.full_tensor()`` of the first has its rows in another order,
without an error; that of the second ends the process, as gloo compares sizes.

A DTensor does not say that it is the gradient of a parameter, or a moment of Adam. So it has the layout of the job's parameters
that are sharded over tp along a dim of its size. If these differ, it has that of the parameter whose memory it shares, or of
those with its shape; if these differ, too, that is an error.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.errors import Finding, PlanError
from meshwright.layout import Interval, Shard, chunked_shard
from meshwright.private import all_gathered, description_of, placements_replaced, raw_local, storage_of
from meshwright.recipe import Recipe, Slices, chunk_of, place_slices, shape_of, take_slices
from meshwright.runtime.groups import as_bytes
from meshwright.spmd import dtensor_patches
from meshwright.spmd.dtensor_patches import Handler
from meshwright.spmd.patches import lasting

Redistribute = Callable[..., Tensor]


def redistribute_by_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Does so as long as the model lives, which this does not keep alive."""
    layouts = _Layouts(weakref.ref(model), recipe)
    contexts = [position.on(_of_whole(position)) for position in dtensor_patches.POSITIONS]
    contexts += [indexed.on(_of_same_shape(indexed)) for indexed in dtensor_patches.INDEXED]
    if layouts.of_size:  # in chunks, too: another job may have other layouts
        contexts += [patch.on(lambda inner: _ByRecipe(inner, layouts)) for patch in dtensor_patches.redistributions()]
    if layouts.surprising:
        once, twice = dtensor_patches.distributions()
        contexts += [once.on(_distributing(twice=False)), twice.on(_distributing(twice=True))]
        contexts += [mean.on(_mean(mean)) for mean in dtensor_patches.MEANS]
    lasting(model, contexts)


class _Layouts:
    """The layouts over tp of one job's parameters, by what a DTensor says of itself: ranks, sizes, shape, memory."""

    def __init__(self, model: weakref.ref[nn.Module], recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self.of_size: dict[tuple[int, int], set[Shard]] = defaultdict(set)
        self.of_shape: dict[tuple[int, int, tuple[int, ...]], set[Shard]] = defaultdict(set)
        for line in recipe.parameters:
            if isinstance(line.tp, Shard):
                self.of_size[line.tp.ranks, line.tp.size].add(line.tp.on(0))
                self.of_shape[line.tp.ranks, line.tp.dim, line.shape].add(line.tp.on(0))

    @property
    def surprising(self) -> bool:
        """Whether one of them is not what DTensor's ``Shard`` says."""
        return any(not _is_chunks(layout) for layouts in self.of_size.values() for layout in layouts)

    def of_memory(self, local: Tensor) -> set[Shard]:
        """The layout of the parameter whose memory, or whose gradient's memory, a local tensor has."""
        memory, model = storage_of(local), self._model()
        for name, p in model.named_parameters() if model is not None else ():
            layout = line.tp if (line := self._recipe.by_name.get(name)) else None  # None: put on later
            for t in (p, p.grad):
                if isinstance(layout, Shard) and isinstance(t, DTensor) and storage_of(raw_local(t)) == memory:
                    return {layout.on(0)}
        return set()


class _ByRecipe:
    """What is called for ``redistribute_local_tensor``. It knows the layouts of all jobs that are alive."""

    def __init__(self, inner: Any, layouts: _Layouts) -> None:
        self.torch: Redistribute = getattr(inner, "torch", inner)
        self.known: tuple[_Layouts, ...] = (*getattr(inner, "known", ()), layouts)

    def __call__(self, local: Tensor, current: Any, target: Any, **options: Any) -> Tensor:
        before, after = self.layout(current, local), self.layout(target, local)
        if before is None and after is None:
            return self.torch(local, current, target, **options)
        with torch.no_grad():
            if any(p.is_partial() for p in current.placements):
                summed = _without(current, Replicate(), lambda p: p.is_partial())
                local, current = self.torch(local, current, summed), summed
            if current.placements == target.placements:
                return local
            whole = self._whole(local, current, before)
            # Torch has a Partial of a whole value: the value on one rank, zeros on the others.
            unsharded = _without(target, Replicate(), is_sharded)
            whole = self.torch(whole, _without(target, Replicate()), target if after is None else unsharded)
            if after is None:
                return whole
            return take_slices(whole, _slices(target, after, tuple(target.mesh.get_coordinate()))).clone()

    def layout(self, spec: Any, local: Tensor) -> Shard | None:
        """The layout over tp of a DTensor, if its parts are not those that torch takes them for.

        They are others, too, where data axes divide the chunks of tp (``_StridedShard``), but not evenly.
        """
        axis = _tp(spec.mesh)
        if axis is None or not is_sharded(spec.placements[axis]):
            return None
        dim, ranks = spec.placements[axis].dim, spec.mesh.size(axis)
        layout = self.layout_of(tuple(spec.shape), dim, ranks, local)
        twice = sum(is_sharded(p) and p.dim == dim for p in spec.placements) > 1
        return layout or (chunked_shard(0, spec.shape[dim], ranks) if twice and _is_uneven(spec) else None)

    def layout_of(self, shape: tuple[int, ...], dim: int, ranks: int, local: Tensor) -> Shard | None:
        """The same for a tensor of a shape that ``ranks`` ranks shard along a dim."""
        found: set[Shard] = set().union(*(known.of_size.get((ranks, shape[dim]), ()) for known in self.known))
        if len(found) > 1:
            found = (
                set().union(*(known.of_memory(local) for known in self.known))
                or set().union(*(known.of_shape.get((ranks, dim, shape), ()) for known in self.known))
                or found
            )
        if len(found) > 1:
            raise PlanError([_ambiguous(shape, dim, found)], "this use of a DTensor")
        return next((layout for layout in found if not _is_chunks(layout)), None)

    def _whole(self, local: Tensor, spec: Any, layout: Shard | None) -> Tensor:
        if layout is None:
            return self.torch(local, spec, _without(spec, Replicate()))
        axes = [axis for axis, p in enumerate(spec.placements) if is_sharded(p)]
        places = dict(_places(spec, layout, axes))
        shapes = {place: shape_of(slices) for place, slices in places.items()}
        parts = local.new_zeros(max(map(prod, shapes.values())))
        parts[: local.numel()] = local.reshape(-1)
        for axis in reversed(axes):
            ranks = spec.mesh.size(axis)
            parts = all_gathered(as_bytes(parts), spec.mesh.get_group(axis)).view(parts.dtype).view(ranks, *parts.shape)
        whole = local.new_empty(spec.shape)
        for place, slices in places.items():
            place_slices(whole, slices, parts[place][: prod(shapes[place])].view(shapes[place]))
        return whole


def gathered(tensor: DTensor) -> DTensor:
    """The tensor, whole on every rank, but for sums that are still to be made."""
    return tensor.redistribute(placements=[p if p.is_partial() else Replicate() for p in tensor.placements])


def _distributing(*, twice: bool) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """The change of a function by which ``distribute_tensor`` takes a part along a dim.

    Args:
        twice: whether a later axis shards the dim, too.
    """

    def change(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def part(
            cls: Any, dim: int, whole: Tensor, mesh: Any, axis: int, src_data_rank: int | None = 0, **others: Any
        ) -> Tensor:
            rule, tp = dtensor_patches.redistributions()[0].now, _tp(mesh)
            layout = None
            if isinstance(rule, _ByRecipe) and tp is not None and (twice or axis == tp):
                layout = rule.layout_of(tuple(whole.shape), dim, mesh.size(tp), whole)
            if layout is None:
                return plain(cls, dim, whole, mesh, axis, src_data_rank, **others)
            if twice:
                raise PlanError([_in_two_steps(whole, dim, layout)], "distribute_tensor")
            if src_data_rank is not None:
                whole = whole.clone(memory_format=torch.contiguous_format)
                dist.broadcast(as_bytes(whole), group=mesh.get_group(axis), group_src=src_data_rank)
            return layout.on(dim).take(whole, mesh.get_local_rank(axis)).clone()

        return part

    return change


def _is_surprising(tensor: DTensor) -> bool:
    """Whether the parts of a DTensor are not those that torch takes them for."""
    rule = dtensor_patches.redistributions()[0].now
    return isinstance(rule, _ByRecipe) and rule.layout(description_of(tensor), raw_local(tensor)) is not None


def is_in_even_chunks(tensor: DTensor) -> bool:
    """Whether the parts of a DTensor are chunks, as torch takes them for, all of one size."""
    return not _is_uneven(description_of(tensor)) and not _is_surprising(tensor)


def _of_whole(patch: dtensor_patches.DTensorPatch) -> Handler:
    """For a function that asks where its elements are in the whole tensor. Torch takes the part for a chunk."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return patch.plain(tuple(map(whole, args)), kwargs)

    def whole(value: Any) -> Any:
        return gathered(value) if isinstance(value, DTensor) and not is_in_even_chunks(value) else value

    return handler


def _of_same_shape(patch: dtensor_patches.DTensorPatch) -> Handler:
    """For a function of tensors and indices, which need not have one shape. In torch each rank takes its part of each."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len({t.shape for t in args if isinstance(t, DTensor)}) > 1:
            args = tuple(gathered(t) if isinstance(t, DTensor) else t for t in args)
        return patch.plain(args, kwargs)

    return handler


def _mean(patch: dtensor_patches.DTensorPatch) -> Handler:
    """The mean as a sum, divided afterwards. Torch adds the means of the ranks' shares, each with the same weight."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        floats = tensor.is_floating_point() or tensor.is_complex()  # torch refuses others
        if not floats or not _is_surprising(tensor):
            return patch.plain(args, kwargs)
        dtype = kwargs.get("dtype") or tensor.dtype
        dims = [*((args[1] if len(args) > 1 else None) or range(tensor.ndim))]
        total = tensor.sum(dims, len(args) > 2 and args[2], dtype=torch.promote_types(dtype, torch.float32))
        return (total / prod(tensor.shape[dim] for dim in dims)).to(dtype)

    return handler


def _places(spec: Any, layout: Shard, axes: list[int]) -> Iterator[tuple[tuple[int, ...], Slices]]:
    """(coordinates on ``axes``, the slices there) of all parts of a tensor."""
    for place in itertools.product(*(range(spec.mesh.size(axis)) for axis in axes)):
        coordinate = [0] * spec.mesh.ndim
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        yield place, _slices(spec, layout, tuple(coordinate))


def _slices(spec: Any, layout: Shard, coordinate: tuple[int, ...]) -> Slices:
    """The part at a coordinate of the mesh: sharded over tp by the layout, then in chunks over other axes, as FSDP2 does it."""
    tp = _tp(spec.mesh)
    assert tp is not None
    ranges: list[tuple[Interval, ...]] = [((0, n),) if n else () for n in spec.shape]
    if is_sharded(spec.placements[tp]):
        ranges[spec.placements[tp].dim] = layout.intervals(coordinate[tp])
    for axis, placement in enumerate(spec.placements):
        if axis != tp and is_sharded(placement):
            ranges[placement.dim] = chunk_of(ranges[placement.dim], spec.mesh.size(axis), coordinate[axis])
    return tuple(ranges)


def _tp(mesh: Any) -> int | None:
    """The number of the axis ``tp`` in a mesh."""
    names = mesh.mesh_dim_names or ()
    return names.index("tp") if "tp" in names else None


def is_sharded(placement: Any) -> bool:
    """Whether ranks of an axis have different parts. (``_StridedShard`` is no ``Shard``.)"""
    return not (placement.is_replicate() or placement.is_partial())


def _without(spec: Any, other: Any, which: Callable[[Any], bool] = lambda p: True) -> Any:
    """The description with ``other`` in place of some of its placements."""
    return placements_replaced(spec, (other if which(p) else p for p in spec.placements))


def _is_uneven(spec: Any) -> bool:
    """Whether a dim does not divide by the ranks of the axes that shard it."""
    ranks = [1] * len(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if is_sharded(placement):
            ranks[placement.dim] *= spec.mesh.size(axis)
    return any(size % parts for size, parts in zip(spec.shape, ranks, strict=True))


def _is_chunks(layout: Shard) -> bool:
    return layout == chunked_shard(0, layout.size, layout.ranks)


def _ambiguous(shape: tuple[int, ...], dim: int, found: set[Shard]) -> Finding:
    return Finding(
        where=f"a DTensor of shape {shape}, sharded over tp along dim {dim}",
        given=f"parameters with {shape[dim]} elements along a dim that are sharded over tp in different ways: "
        + " and ".join(sorted(str(layout.pieces) for layout in found)),
        required="a parameter, its gradient, or a tensor of a shape that only parameters of one layout have",
        fix="dict(job.full_parameters()), or full_tensor() of the parameter or gradient itself",
    )


def _in_two_steps(whole: Tensor, dim: int, layout: Shard) -> Finding:
    return Finding(
        where=f"distribute_tensor of a tensor of shape {tuple(whole.shape)}, along dim {dim} over tp and another axis",
        given=f"parameters with {layout.size} elements along a dim that are not sharded over tp in even chunks",
        required="a DTensor that is divided over both axes at once",
        fix="replicated = DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim)\n"
        "replicated.redistribute(placements=p.placements)",
    )


__all__ = ["gathered", "is_in_even_chunks", "is_sharded", "redistribute_by_recipe"]
