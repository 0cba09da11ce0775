"""Convolutions sharded over channels: by output channel (column), by input channel (row), or by group."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from meshwright.layout import Shard
from meshwright.spmd.decide.contraction import contract, local_bias
from meshwright.spmd.decide.pointwise import of_each
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decision import GATHER, Answer, Decision, Gather, Units, matching, use_as, use_local, use_varying
from meshwright.spmd.signature import Call, Operand, layout_of


@decider("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: Call) -> Answer:
    """A convolution as a product: labels for channels, and for the spatial dims of input and kernel."""
    transposed = "transpose" in call.name
    tail = "output_padding groups dilation" if transposed else "dilation groups"
    names = named(f"input weight bias stride padding {tail}", call.args, call.kwargs)
    x, weight, bias, groups = names.pop("input"), names.pop("weight"), names.pop("bias", None), names.pop("groups", 1)
    if any(isinstance(t.layout, Shard) and 0 in t.layout.locals for t in (x, weight)):
        return GATHER  # torch refuses a convolution without channels, or gives it another shape
    spatial_dims = weight.dim() - 2
    lead = list(range(x.dim() - spatial_dims - 1))
    if isinstance(x.layout, Shard) and x.layout.dim > len(lead):
        return GATHER  # a spatial dim is sharded: ranks would have to exchange borders
    if isinstance(weight.layout, Shard) and weight.layout.dim > 1:
        return GATHER  # a spatial dim of the kernel is sharded
    if groups != 1:
        return _grouped(call, x, weight, bias, groups, names, len(lead))
    spatial = [f"s{i}" for i in range(spatial_dims)]
    ends = ["i", "o"] if transposed else ["o", "i"]
    labels: list[list[Any]] = [[*lead, "i", *spatial], [*ends, *(f"k{i}" for i in range(spatial_dims))]]
    product = contract([x, weight], labels, [*lead, "o", *spatial])
    bias_use, choices = local_bias(bias, product.out, len(lead))
    return product.decision(getattr(functional, call.name), bias_use, choices=choices, groups=1, **names)


def _grouped(call: Call, x: Operand, weight: Operand, bias: Any, groups: int, names: Any, channel: int) -> Answer:
    """A convolution with groups: each rank needs whole groups of channels, or rows of the batch. ``channel``: their dim."""
    layout, run = x.layout, getattr(functional, call.name)
    if isinstance(layout, Shard) and layout.dim < channel:
        return Decision(
            run, (use_local(x), use_varying(weight), use_varying(bias)), {"groups": groups, **names}, layout
        )
    if not isinstance(layout, Shard) or layout.parts != 1:
        return GATHER
    width = x.shape[channel] // groups
    if any(n % width for n in layout.pieces[0]):
        return Gather(Units(x.index, groups))
    counts = tuple(n // width for n in layout.pieces[0])  # groups on each rank
    of_weight = Shard(0, (tuple(n * (weight.shape[0] // groups) for n in counts),))
    outputs = weight.shape[1] if "transpose" in call.name else weight.shape[0] // groups
    of_result = Shard(channel, (tuple(n * outputs for n in counts),))
    if 0 in counts:  # every rank must decide alike
        return GATHER
    args = (use_local(x), use_as(weight, of_weight), use_as(bias, of_result.on(0)))
    choices = (*matching(weight, of_weight), *matching(bias, of_result.on(0)))
    return Decision(run, args, {"groups": counts[call.rank], **names}, of_result, choices=choices)


@decider("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
      "adaptive_max_pool1d", "adaptive_max_pool2d", "lp_pool2d", "interpolate", "upsample", "pad", "pixel_shuffle",
      "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "instance_norm", "local_response_norm")  # fmt: skip
def over_space(call: Call) -> Answer:
    """Functions that work on the last dims alone: they run on local tensors if rows or channels are sharded."""
    args, kwargs, name = call.args, call.kwargs, call.name
    x = args[0] if args else kwargs.get("input")
    layout = layout_of(x)
    if not isinstance(x, Operand) or not isinstance(layout, Shard) or name in _MIXES:
        return GATHER
    if 0 in layout.locals:  # most refuse a tensor without elements; every rank must decide alike
        return GATHER
    if layout.dim >= x.dim() - _space(call, x) or len(call.operands) > 1:
        return GATHER
    return of_each(call, use_local, layout)


def _space(call: Call, x: Operand) -> int:
    """The number of last dims on which a function works."""
    if call.name == "pad":
        return len(call.args[1] if len(call.args) > 1 else call.kwargs["pad"]) // 2
    return next((int(c) for c in call.name if c.isdigit()), x.dim() - 2)


_MIXES = {"instance_norm", "local_response_norm", "pixel_shuffle"}  # these mix channels
