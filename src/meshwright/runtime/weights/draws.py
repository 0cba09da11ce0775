"""``draw_whole``: random numbers for sharded tensors between steps, as on one device.

    nn.init.normal_(job.module.head.weight)
    p.add_(torch.randn_like(p), alpha=0.01)

On a CPU, DTensor lets each rank draw for its part alone, from its own generator: over tp, whose ranks have the same generators,
all parts get the same numbers, and where shares are uneven, copies get different ones (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.private import description_of, pytree, raw_local, schema_of
from meshwright.runtime.weights.copied_views import copy_part
from meshwright.spmd import dtensor_patches
from meshwright.spmd.patches import lasting


def draw_whole(model: nn.Module) -> None:
    """Makes every rank draw the numbers of the whole tensor, from its generator, and take its part, as long as ``model`` lives,
    which this does not keep alive. Ranks that differ in data take those of the first: a draw is collective.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        lasting(model, [draw.on(_draw) for draw in dtensor_patches.DRAWS])


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of a random function of ATen, whose first argument is a DTensor."""
    target, *others = args
    in_place = bool(schema_of(op).arguments[0].alias_info)
    whole = target.full_tensor() if op in _OF_VALUES else _like(target)
    others, kwargs = pytree.tree_map_only(DTensor, DTensor.full_tensor, (others, kwargs))
    drawn = op(whole, *others, **kwargs)
    results = [_divided(_of_first(result, target), target) for result in pytree.tree_leaves(drawn)]
    if in_place:
        with torch.no_grad():
            raw_local(target).copy_(raw_local(results[0]))
        return target
    return results[0] if len(results) == 1 else tuple(results)


_OF_VALUES = {torch.ops.aten.bernoulli.default, torch.ops.aten.native_dropout.default}


def _like(t: DTensor) -> Tensor:
    """A whole tensor of the form of ``t``, without values."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=raw_local(t).device)


def _of_first(whole: Tensor, target: DTensor) -> Tensor:
    """What the first rank has drawn of those whose generators differ, on all of them."""
    mesh = target.device_mesh
    for axis in mesh.mesh_dim_names or ():
        if axis != "tp" and mesh[axis].size() > 1:
            dist.broadcast(whole, group=mesh.get_group(axis), group_src=0)
    return whole


def _divided(whole: Tensor, target: DTensor) -> DTensor:
    """A whole tensor, divided as ``target`` is."""
    part = DTensor(
        raw_local(target).new_empty(raw_local(target).shape, dtype=whole.dtype),
        description_of(target),
        requires_grad=False,
    )
    copy_part(whole, part)
    return part


__all__ = ["draw_whole"]
