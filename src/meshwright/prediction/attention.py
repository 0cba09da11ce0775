"""``dropout_in_kernel``: attention with dropout, in a rehearsal for an accelerator.

    accelerator    one kernel, which draws the dropout: it stores the result, and a number for each query
    CPU            a kernel without dropout; with dropout a product, a softmax, a mask and a product, each of which stores
                   (heads · queries · keys) numbers

A rehearsal runs on a CPU. For an accelerator it leaves out the dropout, so torch takes the kernel.

Source: the backends of ``torch.nn.functional.scaled_dot_product_attention`` in PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from meshwright.spmd import patches


@contextmanager
def dropout_in_kernel() -> Iterator[None]:
    """While on, attention runs without dropout."""
    with patches.ATTENTION.on(_without_dropout):
        yield


def _without_dropout(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attention
