"""``checksum``: a number that tells whether two tensors have the same bits.

    bits of the tensor, as 64-bit integers      a₀ a₁ a₂ …
    sums of 1024 of them each                   s₀ s₁ …
    checksum                                    Σ sᵢ·(2i + 1)  + the rest, modulo 2⁶⁴

Sums of integers are exact, so no device's order of summation changes them. Equal bits give equal numbers, whatever they
stand for: NaN too, and 0.0 and -0.0 differ. The factors tell apart tensors that have the same blocks in another order.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from meshwright.described import dense
from meshwright.layout import in_one_dim
from meshwright.private import FakeTensor

_BLOCK = 1024  # integers in one sum: the sums of all blocks take 0.1 % of the tensor's memory
_LANE = 8  # bytes of a 64-bit integer


@torch.no_grad()
def checksum(t: Tensor) -> Tensor:
    """The checksum of a tensor's bits: an int64 without dims, on the tensor's device.

    Memory: one int64 for each 1024 · 8 bytes of the tensor.
    """
    if not t.numel():
        return torch.zeros((), dtype=torch.int64, device=t.device)
    data = in_one_dim(t.detach().resolve_conj().resolve_neg()).view(torch.uint8)
    if data.storage_offset() % _LANE:
        data = data.clone()  # cannot be read as 64-bit integers where it lies
    full = data.numel() - data.numel() % _LANE
    total = _sum_of_lanes(data[:full].view(torch.int64))
    if full < data.numel():
        rest = data[full:].long()
        total = total + (rest << torch.arange(0, 8 * rest.numel(), 8, device=t.device)).sum()
    return total


def _sum_of_lanes(lanes: Tensor) -> Tensor:
    """The checksum of 64-bit integers in one dim."""
    blocks = lanes.numel() // _BLOCK
    if blocks < 2:
        return lanes.sum()
    sums = lanes[: blocks * _BLOCK].view(blocks, _BLOCK).sum(1)
    factors = torch.arange(1, 2 * blocks + 1, 2, device=lanes.device)
    return (sums * factors).sum() + lanes[blocks * _BLOCK :].sum()


def digest(t: Tensor) -> tuple[Any, ...]:
    """(dtype, shape, SHA-256 of the bits), computed on the host. Tensors with the same digest have the same bits.

    A tensor without values (on meta, or of a rehearsal) has an empty SHA-256. Torch's pickle cannot be hashed instead: it
    differs for equal tensors.
    """
    if t.is_nested:
        return tuple(map(digest, t.unbind()))
    if t.is_meta or isinstance(t, FakeTensor):
        return str(t.dtype), tuple(t.shape), ""
    values = in_one_dim(dense(t.detach()).cpu()).view(torch.uint8) if t.numel() else t.new_empty(0)
    return str(t.dtype), tuple(t.shape), hashlib.sha256(values.numpy().tobytes()).hexdigest()
