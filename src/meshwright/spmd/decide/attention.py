"""Scaled dot product attention: local where heads or rows of the batch are cut."""

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
    use = _mask(mask, target, q.dim())
    if names.get("dropout_p", 0.0) > 0 and q.device.type != "meta":
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        shape = (*lead, q.shape[-2], k.shape[-2])
        return Decision(attention_with_dropout, (*uses, use, shape, target), names, target, axis=True)
    return Decision(functional.scaled_dot_product_attention, (*uses, use), names, target)


def _of_groups(q: Tensor, k: Tensor, v: Tensor, times: int, mask: Tensor | None, **options: Any) -> Tensor:
    """Attention in which ``times`` heads share a key and a value."""
    k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    return functional.scaled_dot_product_attention(q, k, v, mask, **options)


def _target(tensors: Sequence[Operand]) -> Shard | None:
    """The cut of a head or batch dim that the largest sharded operand has."""
    candidates = [(x.numel(), -i, x.layout) for i, x in enumerate(tensors) if isinstance(x.layout, Shard)]
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))  # a sharded dim of size 1 may be spread
    fits = [entry for entry in candidates if entry[2].dim < len(lead) and entry[2].size == lead[entry[2].dim]]
    return max(fits, key=lambda e: e[:2])[2] if fits else None


def _mask(mask: Operand | None, target: Shard, rank: int) -> Any:
    if mask is None:
        return None
    dim = target.dim - (rank - mask.dim())
    return use_varying(mask) if dim < 0 or mask.shape[dim] == 1 else use_as(mask, target.on(dim))
