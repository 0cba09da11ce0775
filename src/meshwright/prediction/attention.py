"""``attention_in_kernel``: attention with dropout or a trained mask, in a rehearsal for an accelerator.

    accelerator    one kernel, which draws the dropout: it stores the result, and a number for each query
    CPU            a kernel without dropout and for masks that are not trained; else a product, a softmax, a mask and a product,
                   each of which stores (heads · queries · keys) numbers

A rehearsal runs on a CPU. For an accelerator it leaves out the dropout, so torch takes the kernel. With a trained mask it calls
the kernel that an accelerator has for it, which needs no values. The mask's gradient has a number for each head, query and key.

Source: the backends of ``torch.nn.functional.scaled_dot_product_attention`` in PyTorch's documentation; ``preprocess_mask`` of
its ``aten/src/ATen/native/transformers/attention.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.spmd import patches
from meshwright.spmd.decide.types import as_autocast
from meshwright.spmd.tensor import GlobalTensor

_ALIGNED = 8
"""A row of the mask begins at a multiple of this number of elements."""
_DTYPES = frozenset([torch.float32, torch.bfloat16, torch.float16])
"""Dtypes for which an accelerator has the kernel."""


@contextmanager
def attention_in_kernel() -> Iterator[None]:
    """While on, attention runs without dropout, and in one kernel."""
    with patches.ATTENTION.on(_in_kernel):
        yield


def _in_kernel(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tensors = (query, key, value, attn_mask)
        if not enable_gqa and _is_trained(attn_mask) and not any(isinstance(t, GlobalTensor) for t in tensors):
            tensors = tuple(map(as_autocast, tensors))
            if all(t.dim() == 4 and t.dtype == tensors[0].dtype and t.dtype in _DTYPES for t in tensors):
                return _with_trained_mask(*tensors, scale)
        return attend(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attention


def _is_trained(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.requires_grad and torch.is_grad_enabled()


def _with_trained_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention with a trained mask, as an accelerator computes it.

    Args:
        query, key, value: (rows, heads, queries or keys, width).
        mask: broadcasts to (rows, heads, queries, keys); it is added to the scores.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    mask = mask.expand(*mask.shape[:-2], queries, keys)
    if keys % _ALIGNED:
        mask = functional.pad(mask, (0, -keys % _ALIGNED))[..., :keys]
    mask = mask.expand(*query.shape[:-2], queries, keys)
    attended = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scale)
    result: Tensor = attended[0]
    return result
