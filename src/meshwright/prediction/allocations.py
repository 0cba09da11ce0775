"""What kernels and backends allocate while they run, and give back: no dispatch mode sees it.

| who | what | where |
| --- | --- | --- |
| a convolution of oneDNN | max(input + weight, output), in blocks of 16 channels | `convolution_workspace` |
| its backward | gradient of the output + input, or gradient of the input | `convolution_workspace` |
| gloo, all-gather and reduce-scatter | a copy of the whole tensor | `CPU` |
| gloo, sends | what is sent lives until the end of the schedule: a send is not told to have ended before | `CPU` |

Seen in torch 2.13 by counting what its allocator reports (tests/prediction/test_allocations.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """Bytes that a convolution of oneDNN takes besides what it is given and gives: operands in blocks of channels.

    Forward: the input and the weight in blocks, until the output in blocks is there, which is then copied. Backward: the
    gradient of the output, and with it first the gradient of the input, then the input, in blocks.
    """
    if name == "convolution" and isinstance(out, Tensor):
        x, weight = args[0], args[1]
        return max(_blocked(x) + weight.numel() * weight.element_size(), _blocked(out))
    if name == "convolution_backward":
        gradient, x = args[0], args[1]
        return _blocked(gradient) + max(_padded(x) - x.numel() * x.element_size(), _blocked(x))
    return 0


def _blocked(x: Tensor) -> int:
    """Bytes of a tensor in blocks of channels; a few channels are not put in blocks."""
    return 0 if x.dim() < 3 or x.shape[1] <= 3 else _padded(x)


def _padded(x: Tensor) -> int:
    """Bytes of a tensor whose channels are filled up to whole blocks."""
    channels = x.shape[1]
    return x.numel() // channels * (-(-channels // BLOCK) * BLOCK) * x.element_size()
