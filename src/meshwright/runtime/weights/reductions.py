"""``reduce_whole``: what reduces the elements of sharded tensors between steps, as on one device.

    distance = sum(F.mse_loss(p, start[name]) for name, p in job.named_parameters())
    sparsity = sum(p.norm(dim=0).sum() for p in job.parameters())

In DTensor (torch 2.13), without an error:

    a loss with ``reduction="mean"``   each rank divides by the elements of its part: gradients are as many times too large as
                                       there are ranks, and where shares are uneven the value is wrong, too
    ``any``                            ranks that have found one are counted: what is computed from it is wrong
    a sum over no dims, which is all   is that of each rank's part; C++ has it in the gradient of ``amax``, which is then NaN
    the sum of norms                   norms over parts are added as if they were sums
    ``fill_`` of a sum over parts      each rank's summand is filled; C++ has it in ``1 - x``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.private import description_of, placements_replaced, raw_local, schema_of, set_description
from meshwright.spmd import dtensor_patches
from meshwright.spmd.dtensor_patches import DTensorPatch, Handler
from meshwright.spmd.patches import lasting

_NONE, _MEAN, _SUM = range(3)  # ATen's numbers of reductions


def reduce_whole(owner: object) -> None:
    """Makes such functions those of the whole tensor, as long as ``owner`` lives, which this does not keep alive."""
    handlers: Mapping[Callable[[DTensorPatch], Handler], tuple[DTensorPatch, ...]] = {
        _loss: dtensor_patches.LOSSES,
        _sum: dtensor_patches.SUMS,
        _any: dtensor_patches.ANYS,
        _fill: dtensor_patches.FILLS,
    }
    lasting(owner, [patch.on(make(patch)) for make, patches in handlers.items() for patch in patches])


def _loss(patch: DTensorPatch) -> Handler:
    """For a loss, or its backward: a mean is that of the elements' losses."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = schema_of(op).arguments
        defaults = {a.name: a.default_value for a in arguments}
        given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        if given["reduction"] != _MEAN:
            return patch.plain(args, kwargs)
        if "grad_output" not in given:
            return patch.plain(tuple((given | {"reduction": _NONE}).values()), {}).mean()
        gradient = given["grad_output"] / given["self"].numel()
        return patch.plain(tuple((given | {"reduction": _SUM, "grad_output": gradient}).values()), {})

    return handler


def _sum(patch: DTensorPatch) -> Handler:
    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *others = args
        if others and not others[0]:
            others[0] = [*range(tensor.ndim)]
        of_norms = any(p.is_partial() and type(p) is not Partial for p in tensor.placements)
        return patch.plain((_whole(tensor) if of_norms else tensor, *others), kwargs)

    return handler


def _any(patch: DTensorPatch) -> Handler:
    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = patch.plain(args, kwargs)
        placements = [Partial("max") if p.is_partial() else p for p in found.placements]
        set_description(found, placements_replaced(description_of(found), placements))
        return found

    return handler


def _fill(patch: DTensorPatch) -> Handler:
    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not _is_partial(tensor):
            return patch.plain(args, kwargs)
        set_description(tensor, placements_replaced(description_of(tensor), _reduced(tensor)))
        op(raw_local(tensor), *args[1:], **kwargs)
        return tensor

    return handler


def _is_partial(t: DTensor) -> bool:
    return any(p.is_partial() for p in t.placements)


def _reduced(t: DTensor) -> list[Placement]:
    """The placements of a tensor after its parts are reduced."""
    return [Replicate() if p.is_partial() else p for p in t.placements]


def _whole(t: DTensor) -> DTensor:
    return t.redistribute(placements=_reduced(t)) if _is_partial(t) else t


__all__ = ["reduce_whole"]
