"""``checksum``: a number that tells whether two tensors have the same bits.

    bits of the tensor, as 64-bit integers      a₀ a₁ a₂ …, 1024 in a row: aᵢⱼ
    checksum                                    Σᵢ fᵢ · Σⱼ aᵢⱼ·gⱼ  + the rest, modulo 2⁶⁴

Sums of integers are exact, so no device's order of summation changes them. Equal bits give equal numbers, whatever they
stand for: NaN too, and 0.0 and -0.0 differ. The factors are hashes, so that neither another order of the same integers nor
small integers of the same sum (counts, ids) give the same number.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from meshwright.described import dense
from meshwright.layout import in_one_dim
from meshwright.private import FakeTensor

_ROW = 1024  # integers
_AT_ONCE = 1024  # rows: their products take 8 MiB
_LANE = 8  # bytes of a 64-bit integer
# The constants of SplitMix64, as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@torch.no_grad()
def checksum(t: Tensor) -> Tensor:
    """The checksum of a tensor's bits: an int64 without dims, on the tensor's device.

    Memory: 0.1 % of the tensor's, and 8 MiB.
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
    rows, rest = divmod(lanes.numel(), _ROW)
    if not rows:
        return (lanes * _factors(rest, lanes.device)).sum()
    in_row, of_rows = _factors(_ROW + rows, lanes.device).split([_ROW, rows])
    total = (lanes[rows * _ROW :] * in_row[:rest]).sum()
    parts = zip(lanes[: rows * _ROW].view(rows, _ROW).split(_AT_ONCE), of_rows.split(_AT_ONCE), strict=True)
    return total + sum(((part * in_row).sum(1) * factors).sum() for part, factors in parts)


def _factors(count: int, device: torch.device) -> Tensor:
    """``count`` odd 64-bit integers without a pattern, int64: SplitMix64 (Steele, Lea and Flood, 2014), but with arithmetic
    shifts, as torch has no unsigned ones."""
    x = torch.arange(1, count + 1, device=device) * _GOLDEN
    for shift, factor in _MIXES:
        x = (x ^ (x >> shift)) * factor
    return x | 1


def digest(t: Tensor) -> tuple[Any, ...]:
    """(dtype, shape, SHA-256 of the bits), computed on the host. Tensors with the same digest have the same bits.

    A tensor without values (on meta, or of a rehearsal) has an empty SHA-256. Torch's pickle cannot be hashed instead: it
    differs for equal tensors.
    """
    if t.is_nested:
        return tuple(map(digest, t.unbind()))
    if t.is_meta or isinstance(t, FakeTensor):
        return str(t.dtype), tuple(t.shape), ""
    values = in_one_dim(dense(t.detach()).cpu()).view(torch.uint8) if t.numel() else torch.empty(0)
    return str(t.dtype), tuple(t.shape), hashlib.sha256(values.numpy().tobytes()).hexdigest()


def number_of(text: str) -> int:
    """A hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
