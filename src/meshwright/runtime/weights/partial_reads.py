"""``refuse_partial_reads``: ``.item()`` of a DTensor that is Partial is an error; within an optimizer, the whole number.

The norm, sum, mean or largest element of a sharded parameter or gradient is a DTensor that is Partial: each rank has that of
its own shard. ``.item()``, ``float`` and ``bool`` of it return this rank's part, without an error (torch 2.13,
https://github.com/pytorch/pytorch/issues/166638):

    if p.grad.isnan().any():           # True on one rank: that rank alone would skip its step
    print(p.grad.norm().item())        # dp_shard=2: the norm of a half
"""

from __future__ import annotations

from typing import Any

from meshwright.errors import Finding, PlanError
from meshwright.private import raw_local
from meshwright.runtime.weights.running_optimizer import running_optimizer
from meshwright.spmd import dtensor_patches
from meshwright.spmd.patches import lasting


def refuse_partial_reads(owner: object) -> None:
    """Makes such reads raise PlanError, as long as ``owner`` lives, which this does not keep alive.

    Within an optimizer's methods, which all ranks run, they return the number of the whole tensor. Elsewhere one rank alone may
    read (``if rank == 0:``), and would wait for the others.
    """
    lasting(owner, [dtensor_patches.READ.on(_read)])


def _read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if not any(placement.is_partial() for placement in tensor.placements):
        return op(raw_local(tensor))
    if running_optimizer(of_torch=True) is None:
        raise PlanError([_finding(tensor)], "this read of a value")
    return op(tensor.full_tensor())


def _finding(tensor: Any) -> Finding:
    axes = " and ".join(
        str(axis)
        for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False)
        if placement.is_partial()
    )
    return Finding(
        where="item, float, int or bool of a tensor",
        given=f"a DTensor of which each rank has a part over {axes or 'its mesh'}: it was computed from a sharded parameter "
        "or gradient",
        required="a tensor that is whole on this rank",
        fix="tensor.full_tensor().item(), which all ranks must call; for the norm of all gradients job.grad_norm(), or what "
        "job.clip_grad_norm_(max_norm) returns",
    )


__all__ = ["refuse_partial_reads"]
