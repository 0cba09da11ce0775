"""``Allocations``: memory that kernels and backends allocate and free while they run. A dispatch mode cannot see it.

| allocated by | bytes | name |
| --- | --- | --- |
| oneDNN's convolution | max(input + weight + padding of the output, output), in blocks of 16 or 8 | `convolution_workspace` |
| its backward | gradient of the output + max(input, gradient of the input), in blocks | `convolution_workspace` |
| softmax, layer norm, and their backwards | contiguous copies of inputs that are not contiguous | `workspace` |
| the backward of CTC's loss | as many logarithms of betas as it gets of alphas | `workspace` |
| gloo's all-gather and reduce-scatter | a copy of the full tensor | `CPU` |
| gloo's send | the sent tensor until the end of the schedule: only then is a send known to have ended | `CPU` |

Measured in torch 2.13 with the reports of its allocator (tests/prediction/test_allocations.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Allocations:
    """What the kernels and backends of a machine allocate while they run.

    Attributes:
        collectives: kind of collective → bytes that it allocates / bytes of the full tensor.
        keeps_sends: whether a sent tensor lives until the end of the schedule.
        workspaces: whether functions allocate the workspaces of CPU kernels (``Op.workspace``).
    """

    collectives: Mapping[str, float] = field(default_factory=dict)
    keeps_sends: bool = False
    workspaces: bool = False


CPU = Allocations({"all_gather": 1.0, "reduce_scatter": 1.0}, keeps_sends=True, workspaces=True)
GPU = Allocations()
"""Nothing: NCCL's buffers are in ``Profile.per_group``, and the workspaces of cuBLAS in ``Profile.context``."""


# Name of a function → the positions of inputs of which its kernel makes contiguous copies.
_CONTIGUOUS: Mapping[str, tuple[int, ...]] = {
    "_softmax": (0,),
    "_log_softmax": (0,),
    "native_layer_norm": (0,),
    "_softmax_backward_data": (0, 1),
    "_log_softmax_backward_data": (0, 1),
    "native_layer_norm_backward": (0, 1),
}
_LOG_ALPHA = 6  # its position among the arguments of the backward of CTC's loss


def workspace(name: str, args: tuple[Any, ...], out: Any) -> int:
    """Peak bytes that a function's kernel on a CPU allocates besides its inputs and outputs. Arguments: as those of
    ``convolution_workspace``."""
    if name == "_ctc_loss_backward":
        return int(args[_LOG_ALPHA].nbytes)
    if (positions := _CONTIGUOUS.get(name)) is not None:
        return sum(args[i].nbytes for i in positions if not args[i].is_contiguous())
    return convolution_workspace(name, args, out)


def convolution_workspace(name: str, args: tuple[Any, ...], out: Any) -> int:
    """Peak bytes that a convolution of oneDNN allocates besides its inputs and outputs: copies in blocks of channels.

    Forward: the input, the weight and the output in blocks (of the output only what the blocks add to it: it is allocated
    later), or the output in blocks alone. Backward: the gradient of the output in blocks, together with first the gradient of
    the input in blocks, then the input in blocks. A convolution of another backend is taken to allocate nothing.

    Args:
        name: of the ATen function, without its namespace. 0 bytes for any other function than a convolution.
        args: its arguments.
        out: its output.
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
    """Bytes of a tensor in blocks of channels; 0 if it has 3 channels or fewer, because oneDNN makes no blocks of them."""
    return 0 if x.dim() < 3 or x.shape[1] <= 3 else _padded(x)


def _padded(x: Tensor) -> int:
    """Bytes of a tensor whose number of channels is rounded up to full blocks."""
    channels, block = x.shape[1], _channels_of_a_block()
    return x.numel() // channels * (-(-channels // block) * block) * x.element_size()


def _channels_of_a_block() -> int:
    """Channels in a block of oneDNN: as many float32 as a register of this CPU has."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
