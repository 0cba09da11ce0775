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
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.private import pytree, raw_local, schema_of
from meshwright.runtime.weights.copied_views import copy_part
from meshwright.runtime.weights.parameters import dtensor_like
from meshwright.spmd import dtensor_patches
from meshwright.spmd.patches import lasting


def draw_whole(owner: object) -> None:
    """Makes every rank draw the numbers of the whole tensor, from its generator, and take its part, as long as ``owner`` lives,
    which this does not keep alive. Data ranks take the numbers of the first one: a draw is collective.
    """
    lasting(owner, [draw.on(_draw) for draw in dtensor_patches.DRAWS])


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of a random function of ATen, whose first argument is a DTensor."""
    target, *others = args
    whole = target.full_tensor() if op in _OF_VALUES else _like(target)
    others, kwargs = pytree.tree_map_only(DTensor, DTensor.full_tensor, (others, kwargs))
    drawn = [_of_first(result, target) for result in pytree.tree_leaves(op(whole, *others, **kwargs))]
    if schema_of(op).arguments[0].alias_info:  # it draws in place
        copy_part(drawn[0], target)
        return target
    results = [_divided(result, target) for result in drawn]
    return results[0] if len(results) == 1 else tuple(results)


_OF_VALUES = {torch.ops.aten.bernoulli.default, torch.ops.aten.native_dropout.default}


def _like(t: DTensor) -> Tensor:
    """A whole tensor of the form of ``t``, without values."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=raw_local(t).device)


def _of_first(whole: Tensor, target: DTensor) -> Tensor:
    """Gives ranks the numbers of the first rank of each axis whose ranks have different generators: of the data axes."""
    mesh = target.device_mesh
    for axis in mesh.mesh_dim_names or ():
        if axis != "tp" and mesh[axis].size() > 1:
            dist.broadcast(whole, group=mesh.get_group(axis), group_src=0)
    return whole


def _divided(whole: Tensor, target: DTensor) -> DTensor:
    """A whole tensor, divided as ``target`` is."""
    part = dtensor_like(target, torch.empty_like(raw_local(target), dtype=whole.dtype))
    copy_part(whole, part)
    return part


__all__ = ["draw_whole"]
