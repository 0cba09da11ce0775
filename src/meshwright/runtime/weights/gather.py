"""Full tensors, gathered from the slices on the ranks as the recipe describes them; one tensor at a time.

Rank 0 assembles them on the CPU, so slices are sent between hosts, as bytes. Sends between GPUs would make a communicator for
each pair of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.placeholder import Placeholder
from meshwright.calls.structure import buffer_places
from meshwright.described import Layout, dense, in_layout, layout_of
from meshwright.recipe import ParameterRecipe, Recipe, place_slices
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.weights.parameters import local_tensor, named_parameters_of


def gather_whole(line: ParameterRecipe, local: Tensor, recipe: Recipe, groups: Groups) -> Tensor | None:
    """The full tensor on rank 0's CPU; None on other ranks. Collective over all ranks.

    Of the ranks with equal slices, one sends its slice to rank 0.
    """
    holders = _holders(line, recipe)
    slices = {rank: recipe.held(line, rank) for rank in holders}
    if groups.rank == 0:
        full = torch.empty(line.shape, dtype=local.dtype, device="cpu")
        for rank in holders:
            shape = recipe.held_shape(line, rank)
            piece = local.cpu() if rank == groups.rank else _received(shape, local.dtype, rank, groups)
            if piece.numel():
                place_slices(full, slices[rank], piece)
        return full
    if groups.rank in holders:
        _send(local, groups)
    return None


def full_on_every_rank(
    line: ParameterRecipe, local: Tensor | None, dtype: torch.dtype, recipe: Recipe, groups: Groups
) -> Tensor | None:
    """The full tensor on every rank's device. Collective over all ranks.

    Args:
        local: this rank's slice (of a gradient, for example); None if the rank holds no slice or has no such tensor.

    Returns:
        None if no rank has a slice. A rank that holds the parameter but has no such tensor counts as zeros.
    """
    if not any(groups.on_any([local is not None])):
        return None
    if local is None:
        shape = recipe.held_shape(line, groups.rank) if recipe.holds(line, groups.rank) else ()
        local = torch.zeros(shape, dtype=dtype, device=groups.device)
    full = gather_whole(line, local, recipe, groups)
    full = torch.empty(line.shape, dtype=dtype, device="cpu") if full is None else full.contiguous()
    dist.broadcast(as_bytes(full), src=0, group=groups.hosts[""])
    return full.to(groups.device)


def _holders(line: ParameterRecipe, recipe: Recipe) -> list[int]:
    """The first rank of each set of ranks that hold the same slice."""
    first: dict[Any, int] = {}
    for rank in range(recipe.mesh.size):
        if recipe.holds(line, rank):
            first.setdefault(recipe.held(line, rank), rank)
    return sorted(first.values())


def full_buffers(model: nn.Module, recipe: Recipe, groups: Groups) -> Iterator[tuple[str, Tensor | None]]:
    """(name, value on rank 0's CPU) for every buffer, from the rank whose forward changes it. Collective.

    A forward may replace a buffer by one of another shape or dtype, or register a new one: the owner sends these facts first.
    """
    buffers, places = dict(_candidates(model, recipe, groups.rank)), buffer_places(model)
    facts = {name: _BufferFacts(places[name], tuple(b.shape), b.dtype, layout_of(b)) for name, b in buffers.items()}
    facts_of_ranks = [facts]
    if dist.get_world_size() > 1:
        facts_of_ranks = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(facts_of_ranks, facts, group=groups.hosts[""])
    owners = {name: rank for rank, names in reversed([*enumerate(facts_of_ranks)]) for name in names}
    for name in sorted(owners, key=lambda name: facts_of_ranks[owners[name]][name].place):
        owner = owners[name]
        value = None
        if groups.rank == 0 and owner == 0:
            value = buffers[name].detach().to("cpu", copy=True)
        elif groups.rank == 0:
            of_buffer = facts_of_ranks[owner][name]
            value = in_layout(of_buffer.layout, _received(of_buffer.shape, of_buffer.dtype, owner, groups))
        elif groups.rank == owner:
            _send(dense(buffers[name]), groups)
        yield name, value


class _BufferFacts(NamedTuple):
    """What a receiver needs to know of a buffer. ``place``: see ``buffer_places``."""

    place: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


def _candidates(model: nn.Module, recipe: Recipe, rank: int) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of each buffer whose copy on this rank may be the one to gather.

    Planning says whose copy of a buffer counts. A buffer that a forward registers, which planning does not know, may be taken
    from any rank that has it.
    """
    known = {name for name, *_ in recipe.buffers}
    for name, b in model.named_buffers():
        is_new = bool(known) and name not in known and not isinstance(b, Placeholder)
        if is_new or recipe.buffer_owner(name) == rank:
            yield name, b


def _received(shape: tuple[int, ...], dtype: torch.dtype, source: int, groups: Groups) -> Tensor:
    """A tensor of this shape and type from another rank, on CPU."""
    value = torch.empty(shape, dtype=dtype, device="cpu")
    if value.numel():
        dist.recv(as_bytes(value), src=source, group=groups.hosts[""])
    return value


def _send(value: Tensor, groups: Groups) -> None:
    """Sends a tensor to rank 0, unless it is empty."""
    if value.numel():
        dist.send(as_bytes(value).cpu(), dst=0, group=groups.hosts[""])


def full_tensors(
    model: nn.Module, recipe: Recipe, groups: Groups, pick: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
    """(line, full tensor on rank 0) for every parameter. Collective.

    Args:
        pick: returns the parameter itself, or its gradient. If it returns None on one rank, it must return None on every rank
            that holds the parameter.

    Raises:
        PlanError: on all ranks, if a parameter is no longer in the model.
        RuntimeError: on all ranks, if a rank's tensor has another shape than its share.
    """
    named = named_parameters_of(model, recipe)
    for line in recipe.parameters:
        picked = pick(named[line.name]) if recipe.holds(line, groups.rank) else None
        # A receiver expects the size of the rank's share. Sending more or less than that ends a process.
        strange = picked is not None and tuple(local_tensor(picked).shape) != recipe.held_shape(line, groups.rank)
        flags = torch.tensor([picked is not None, (groups.rank + 1) * strange], dtype=torch.int32, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=groups.hosts[""])
        present, strange_rank = flags.tolist()
        if strange_rank:
            raise RuntimeError(
                f"{line.name}: rank {strange_rank - 1} has a tensor of another shape than its share of it"
            )
        if not present:
            yield line, None
            continue
        local = local_tensor(named[line.name] if picked is None else picked).detach()
        if picked is None and recipe.holds(line, groups.rank):
            local = torch.zeros_like(local)
        yield line, gather_whole(line, local, recipe, groups)
