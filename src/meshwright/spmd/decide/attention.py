"""Scaled dot product attention: runs on local tensors if heads or rows of the batch are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Shard
from meshwright.spmd.decide.random import attention_with_dropout
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decision import GATHER, Answer, Body, Decision, use_as, use_original, use_varying
from meshwright.spmd.signature import Call, Operand


@decider("scaled_dot_product_attention")
def attention(call: Call) -> Answer:
    """Runs on local tensors if heads or rows are sharded; a mask is sharded alike."""
    names = named("query key value attn_mask dropout_p is_causal", call.args, call.kwargs)
    q, k, v, mask = names.pop("query"), names.pop("key"), names.pop("value"), names.pop("attn_mask", None)
    if q.dim() > k.dim() or k.dim() != v.dim() or q.dim() < 3:
        return GATHER
    if names.pop("enable_gqa", False) and q.shape[-3] != k.shape[-3]:
        return Body(_of_groups, (*map(use_original, (q, k, v)), q.shape[-3] // k.shape[-3], use_original(mask)), names)
    target = _target([q, k, v])
    if target is None:
        return GATHER
    uses = [use_as(x, target) if x.shape[target.dim] != 1 else use_varying(x) for x in (q, k, v)]
    mask_use = _mask(mask, target, q.dim())
    if names.get("dropout_p", 0.0) > 0 and q.device.type != "meta":
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        shape = (*lead, q.shape[-2], k.shape[-2])
        return Decision(attention_with_dropout, (*uses, mask_use, shape, target), names, target, axis=True)
    return Decision(functional.scaled_dot_product_attention, (*uses, mask_use), names, target)


def _of_groups(q: Tensor, k: Tensor, v: Tensor, times: int, mask: Tensor | None, **options: Any) -> Tensor:
    """Grouped-query attention: ``times`` heads of the query share one head of key and value."""
    k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    return functional.scaled_dot_product_attention(q, k, v, mask, **options)


def _target(tensors: Sequence[Operand]) -> Shard | None:
    """The layout of the result: that of the largest operand that is sharded along a head or batch dim; None if none is."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))
    fits: list[tuple[int, Shard]] = []
    for x in tensors:
        layout = x.layout
        # A sharded dim of size 1 may broadcast.
        if isinstance(layout, Shard) and layout.dim < len(lead) and layout.size == lead[layout.dim]:
            fits.append((x.numel(), layout))
    return max(fits, key=lambda fit: fit[0])[1] if fits else None


def _mask(mask: Operand | None, target: Shard, rank: int) -> Any:
    """The Use of the mask, whose dims are aligned to the right with the ``rank`` dims of the result."""
    if mask is None:
        return None
    dim = target.dim - (rank - mask.dim())
    return use_varying(mask) if dim < 0 or mask.shape[dim] == 1 else use_as(mask, target.on(dim))
