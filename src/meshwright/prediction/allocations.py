"""What kernels and backends allocate while they run, and give back: no dispatch mode sees it.

| who | what | where |
| --- | --- | --- |
| oneDNN's convolution | max(input + weight + padding of the output, output), in blocks of 16 channels | `convolution_workspace` |
| its backward | gradient of the output + the larger of input and gradient of the input | `convolution_workspace` |
| gloo, all-gather and reduce-scatter | a copy of the whole tensor | `CPU` |
| gloo, sends | what is sent lives until the end of the schedule: a send is not told to have ended before | `CPU` |

Seen in torch 2.13 by counting what its allocator reports (tests/prediction/test_allocations.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCK = 16  # channels of a block, on a CPU with AVX-512


@dataclass(frozen=True)
class Allocations:
    """What a machine's kernels and backends allocate while they run.

    Attributes:
        collectives: kind → in sizes of the whole tensor.
        keeps_sends: whether what is sent lives until the end of a schedule.
        workspaces: whether functions take the workspaces that a CPU's do (``Op.workspace``).
    """

    collectives: Mapping[str, float] = field(default_factory=dict)
    keeps_sends: bool = False
    workspaces: bool = False


CPU = Allocations({"all_gather": 1.0, "reduce_scatter": 1.0}, keeps_sends=True, workspaces=True)
GPU = Allocations()
"""NCCL reduces in buffers of its own (``Profile.per_group``); workspaces of cuBLAS are in ``Profile.context``."""


def convolution_workspace(name: str, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that a convolution of oneDNN takes besides its arguments and results: operands in blocks of channels.

    Forward: the input, the weight and the output in blocks, without what the output itself takes later; or the output in
    blocks, which is then copied. Backward: the gradient of the output in blocks, and with it first the gradient of the input,
    then the input. Convolutions by other backends are taken to need none.
    """
    if name == "convolution" and isinstance(out, Tensor):
        x, weight, options = args[0], args[1], args[3:9]
        if not _by_onednn(x, weight, options):
            return 0
        padding = _padded(out) - out.numel() * out.element_size()
        return max(_blocked(x) + weight.numel() * weight.element_size() + padding, _blocked(out))
    if name == "convolution_backward":
        gradient, x, weight, options = args[0], args[1], args[2], args[4:10]
        if not _by_onednn(x, weight, options):
            return 0
        return _padded(gradient) + max(_padded(x) - x.numel() * x.element_size(), _blocked(x))
    return 0


def _by_onednn(x: Tensor, weight: Tensor, options: Sequence[Any]) -> bool:
    """Whether torch takes oneDNN for a convolution; for one of single points (a kernel of 1) in float32 it takes a product of
    matrices. Private: no function tells. ``options``: the arguments of ``aten::convolution`` from ``stride`` to ``groups``."""
    return bool(torch._C._select_conv_backend(x, weight, None, *options).name == "Mkldnn")


def _blocked(x: Tensor) -> int:
    """Bytes of a tensor in blocks of channels; a few channels are not put in blocks."""
    return 0 if x.dim() < 3 or x.shape[1] <= 3 else _padded(x)


def _padded(x: Tensor) -> int:
    """Bytes of a tensor whose channels are filled up to whole blocks."""
    channels = x.shape[1]
    return x.numel() // channels * (-(-channels // BLOCK) * BLOCK) * x.element_size()
