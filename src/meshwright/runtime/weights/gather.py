"""Whole values from what the ranks hold, by the recipe's slices; one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.recipe import ParameterRecipe, Recipe, place_slices
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.parameters import local_tensor


def gather_whole(line: ParameterRecipe, local: Tensor, recipe: Recipe, groups: Groups) -> Tensor | None:
    """On rank 0 the whole tensor, on CPU; None elsewhere. Collective over all ranks.

    One rank of each set of copies sends its slice to rank 0, which writes it where the recipe says.
    """
    holders = _holders(line, recipe)
    slices = {rank: recipe.held(line, rank) for rank in holders}
    if groups.rank == 0:
        whole = torch.empty(line.shape, dtype=local.dtype)
        for rank in holders:
            shape = recipe.held_shape(line, rank)
            piece = local if rank == groups.rank else torch.empty(shape, dtype=local.dtype, device=groups.device)
            if rank != groups.rank and piece.numel():
                dist.recv(piece, src=rank)
            if piece.numel():
                place_slices(whole, slices[rank], piece.to("cpu"))
        return whole
    if groups.rank in holders and local.numel():
        dist.send(local.contiguous(), dst=0)
    return None


def whole_on_every_rank(
    line: ParameterRecipe, local: Tensor | None, dtype: torch.dtype, recipe: Recipe, groups: Groups
) -> Tensor | None:
    """The whole tensor on every rank's device, of what ranks hold of it. Collective over all ranks.

    Args:
        local: what this rank holds; None if it holds nothing, or has none.

    Returns: None if no rank has one. A holder that has none counts as one with zeros.
    """
    present = torch.tensor(local is not None, device=groups.device).int()
    dist.all_reduce(present, dist.ReduceOp.MAX)
    if not present:
        return None
    if local is None:
        shape = recipe.held_shape(line, groups.rank) if recipe.holds(line, groups.rank) else ()
        local = torch.zeros(shape, dtype=dtype, device=groups.device)
    whole = gather_whole(line, local, recipe, groups)
    whole = torch.empty(line.shape, dtype=dtype, device=groups.device) if whole is None else whole.to(groups.device)
    dist.broadcast(whole, src=0)
    return whole


def _holders(line: ParameterRecipe, recipe: Recipe) -> list[int]:
    """The first rank of each set that holds the same slice."""
    first: dict[Any, int] = {}
    for rank in range(recipe.mesh.size):
        if recipe.holds(line, rank):
            first.setdefault(recipe.held(line, rank), rank)
    return sorted(first.values())


def whole_buffers(model: nn.Module, recipe: Recipe, groups: Groups) -> Iterator[tuple[str, Tensor | None]]:
    """(name, value on rank 0's CPU) of every buffer, as the rank has it whose forward changes it. Collective.

    A forward may put a buffer of another shape or type in a buffer's place, or register one: its owner tells which.
    """
    buffers = {name: b for name, b in model.named_buffers() if recipe.buffer_owner(name) == groups.rank}
    facts = {name: (tuple(b.shape), b.dtype) for name, b in buffers.items()}
    told: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [facts]
    if dist.get_world_size() > 1:
        told = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, facts)
    owners = {name: rank for rank, names in enumerate(told) for name in names}
    order = [name for name, _ in model.named_buffers() if name in owners]
    if dist.get_world_size() > 1:
        holder = [order]
        dist.broadcast_object_list(holder, src=0)
        order = holder[0]
    for name in dict.fromkeys([*order, *owners]):
        owner = owners[name]
        value = None
        if groups.rank == 0 and owner == 0:
            value = buffers[name].detach().to("cpu", copy=True)
        elif groups.rank == 0:
            shape, dtype = told[owner][name]
            value = _received(shape, dtype, owner, groups)
        elif groups.rank == owner and buffers[name].numel():
            dist.send(_as_bytes(buffers[name]), dst=0)
        yield name, value


def _received(shape: tuple[int, ...], dtype: torch.dtype, source: int, groups: Groups) -> Tensor:
    """A tensor of this shape and type from another rank, on CPU."""
    value = torch.empty(shape, dtype=dtype, device=groups.device)
    if value.numel():
        dist.recv(_as_bytes(value), src=source)
    return value.cpu()


def _as_bytes(t: Tensor) -> Tensor:
    """A tensor's elements as bytes, which every backend carries; a contiguous one's own memory."""
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def whole_tensors(
    model: nn.Module, recipe: Recipe, groups: Groups, pick: Callable[[Tensor], Tensor | None]
) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
    """(line, whole value on rank 0) for every parameter; ``pick`` gives the parameter itself, or its gradient.

    Where ``pick`` gives None on a rank, it gives None on every rank that holds the same parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for line in recipe.parameters:
        picked = pick(named[line.name]) if recipe.holds(line, groups.rank) else None
        # A tensor of another shape than is held would be more, or less, than its receiver takes, which ends a process.
        strange = picked is not None and tuple(local_tensor(picked).shape) != recipe.held_shape(line, groups.rank)
        flags = torch.tensor([picked is not None, (groups.rank + 1) * strange], device=groups.device).int()
        dist.all_reduce(flags, dist.ReduceOp.MAX)
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
