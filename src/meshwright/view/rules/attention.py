"""Scaled dot product attention: local where heads or rows of the batch are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Cut
from meshwright.view.rules.random import attention_with_dropout
from meshwright.view.rules.registry import named, rule


@rule("scaled_dot_product_attention")
def attention(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("query key value attn_mask dropout_p is_causal", args, kwargs)
    q, k, v, mask = names.pop("query"), names.pop("key"), names.pop("value"), names.pop("attn_mask", None)
    if q.dim() > k.dim() or k.dim() != v.dim() or q.dim() < 3:
        return NotImplemented
    if names.pop("enable_gqa", False) and q.shape[-3] != k.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    target = _target(work, [q, k, v])
    if target is None:
        return NotImplemented
    locals_ = [work.cut(x, target) if x.shape[target.dim] != 1 else work.varying(x) for x in (q, k, v)]
    names["attn_mask"] = _mask(work, mask, target, q.dim())
    if names.get("dropout_p", 0.0) > 0 and q.device.type != "meta":
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        return work.view(
            attention_with_dropout(work, locals_, (*lead, q.shape[-2], k.shape[-2]), target, names), target
        )
    return work.view(functional.scaled_dot_product_attention(*locals_, **names), target)


def _target(work: Any, tensors: list[Tensor]) -> Cut | None:
    """The cut of a head or batch dim that the largest cut operand has."""
    found = [(x.numel(), -i, layout) for i, x in enumerate(tensors) if isinstance(layout := work.layout(x), Cut)]
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))  # a cut dim of size 1 may be spread
    fits = [entry for entry in found if entry[2].dim < len(lead) and entry[2].size == lead[entry[2].dim]]
    return max(fits, key=lambda e: e[:2])[2] if fits else None


def _mask(work: Any, mask: Tensor | None, target: Cut, rank: int) -> Tensor | None:
    if mask is None:
        return None
    dim = target.dim - (rank - mask.dim())
    if dim < 0 or mask.shape[dim] == 1:
        whole: Tensor = work.varying(mask)
        return whole
    cut: Tensor = work.cut(mask, target.on(dim))
    return cut
