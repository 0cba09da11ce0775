"""Whole values from what the ranks hold, by the recipe's slices; one tensor at a time.

They are put together on the CPU of rank 0, so they come between hosts, as bytes. On a GPU, sends to rank 0 would make a
communicator for each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.recipe import ParameterRecipe, Recipe, place_slices
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.weights.parameters import local_tensor


def gather_whole(line: ParameterRecipe, local: Tensor, recipe: Recipe, groups: Groups) -> Tensor | None:
    """On rank 0 the whole tensor, on CPU; None elsewhere. Collective over all ranks.

    One rank of each set of copies sends its slice to rank 0, which writes it where the recipe says.
    """
    holders = _holders(line, recipe)
    slices = {rank: recipe.held(line, rank) for rank in holders}
    if groups.rank == 0:
        whole = torch.empty(line.shape, dtype=local.dtype, device="cpu")
        for rank in holders:
            shape = recipe.held_shape(line, rank)
            piece = local.cpu() if rank == groups.rank else _received(shape, local.dtype, rank, groups)
            if piece.numel():
                place_slices(whole, slices[rank], piece)
        return whole
    if groups.rank in holders:
        _send(local, groups)
    return None


def whole_on_every_rank(
    line: ParameterRecipe, local: Tensor | None, dtype: torch.dtype, recipe: Recipe, groups: Groups
) -> Tensor | None:
    """The whole tensor on every rank's device, of what ranks hold of it. Collective over all ranks.

    Args:
        local: what this rank holds; None if it holds nothing, or has none.

    Returns: None if no rank has one. A holder that has none counts as one with zeros.
    """
    if not any(groups.on_any([local is not None])):
        return None
    if local is None:
        shape = recipe.held_shape(line, groups.rank) if recipe.holds(line, groups.rank) else ()
        local = torch.zeros(shape, dtype=dtype, device=groups.device)
    whole = gather_whole(line, local, recipe, groups)
    whole = torch.empty(line.shape, dtype=dtype, device="cpu") if whole is None else whole.contiguous()
    dist.broadcast(as_bytes(whole), src=0, group=groups.hosts[""])
    return whole.to(groups.device)


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
        dist.all_gather_object(told, facts, group=groups.hosts[""])
    owners = {name: rank for rank, names in enumerate(told) for name in names}
    order = [name for name, _ in model.named_buffers() if name in owners]
    if dist.get_world_size() > 1:
        holder = [order]
        dist.broadcast_object_list(holder, src=0, group=groups.hosts[""], device=torch.device("cpu"))
        order = holder[0]
    for name in dict.fromkeys([*order, *owners]):
        owner = owners[name]
        value = None
        if groups.rank == 0 and owner == 0:
            value = buffers[name].detach().to("cpu", copy=True)
        elif groups.rank == 0:
            shape, dtype = told[owner][name]
            value = _received(shape, dtype, owner, groups)
        elif groups.rank == owner:
            _send(buffers[name], groups)
        yield name, value


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
