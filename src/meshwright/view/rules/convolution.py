"""Convolutions cut over channels: by output channel (column), by input channel (row), or by group."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from meshwright.layout import Cut
from meshwright.view.rules.contraction import cut_operands, finish, local_bias
from meshwright.view.rules.registry import named, rule
from meshwright.view.tensor import View


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    transposed = "transpose" in func.__name__
    tail = "output_padding groups dilation" if transposed else "dilation groups"
    names = named(f"input weight bias stride padding {tail}", args, kwargs)
    x, weight, bias, groups = names.pop("input"), names.pop("weight"), names.pop("bias", None), names.pop("groups", 1)
    if any(isinstance(layout := work.layout(t), Cut) and 0 in layout.locals for t in (x, weight)):
        return NotImplemented  # torch refuses a convolution without channels, or gives it another shape
    space = weight.dim() - 2
    run = getattr(functional, func.__name__)
    lead = list(range(x.dim() - space - 1))
    spots = [f"s{i}" for i in range(space)]
    taps = [f"k{i}" for i in range(space)]
    if isinstance(layout := work.layout(x), Cut) and layout.dim > len(lead):
        return NotImplemented  # space is cut: borders would have to be exchanged
    if isinstance(layout := work.layout(weight), Cut) and layout.dim > 1:
        return NotImplemented  # so would they where the kernel is
    if groups != 1:
        return _grouped(work, run, x, weight, bias, groups, names, len(lead), transposed)
    ends = ["i", "o"] if transposed else ["o", "i"]
    labels: list[Any] = [[*lead, "i", *spots], [*ends, *taps]]
    out = [*lead, "o", *spots]
    locals_, layout = cut_operands(work, [x, weight], labels, out)
    if bias is not None:
        bias = local_bias(work, bias, layout, len(lead))
    return finish(work, run(*locals_, bias, groups=1, **names), layout)


def _grouped(
    work: Any, run: Any, x: Any, weight: Any, bias: Any, groups: int, names: Any, channel: int, transposed: bool
) -> Any:
    """Channels cut between groups: each rank has some groups whole. Rows of the batch cut: local."""
    layout = work.layout(x)
    if isinstance(layout, Cut) and layout.dim < channel:
        own = [work.varying(p) for p in (weight, bias)]
        return work.view(run(x._mw_local, *own, groups=groups, **names), layout)
    if not isinstance(layout, Cut) or layout.parts != 1:
        return NotImplemented
    width = x.shape[channel] // groups
    if any(n % width for n in layout.pieces[0]):
        work.units(x, groups)
        return NotImplemented
    held = tuple(n // width for n in layout.pieces[0])
    of_weight = Cut(0, (tuple(n * (weight.shape[0] // groups) for n in held),))
    outputs = weight.shape[1] if transposed else weight.shape[0] // groups
    of_result = Cut(channel, (tuple(n * outputs for n in held),))
    if 0 in held:  # the same answer on every rank
        return NotImplemented
    w = work.cut(work.match(weight, of_weight), of_weight)
    b = None if bias is None else work.cut(work.match(bias, of_result.on(0)), of_result.on(0))
    return work.view(run(x._mw_local, w, b, groups=held[work.axis.rank], **names), of_result)


@rule("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
      "adaptive_max_pool1d", "adaptive_max_pool2d", "lp_pool2d", "interpolate", "upsample", "pad", "pixel_shuffle",
      "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "instance_norm", "local_response_norm")  # fmt: skip
def over_space(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of the last dims alone: local where rows or channels are cut."""
    x = args[0] if args else kwargs.get("input")
    layout = work.layout(x)
    if not isinstance(x, View) or not isinstance(layout, Cut) or func.__name__ in _MIXES:
        return NotImplemented
    if func.__name__ == "pad":
        given = args[1] if len(args) > 1 else kwargs["pad"]
        space = len(given) // 2
    else:
        space = (
            int(next(c for c in func.__name__ if c.isdigit()))
            if any(c.isdigit() for c in func.__name__)
            else x.dim() - 2
        )
    others = [*args[1:], *kwargs.values()]
    if 0 in layout.locals:  # most refuse a tensor without elements; the same answer on every rank
        return NotImplemented
    if layout.dim >= x.dim() - space or any(isinstance(t, Tensor) for t in others if t is not x):
        return NotImplemented
    result = func(x._mw_local, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    if isinstance(result, Tensor):
        return work.view(result, layout)
    return type(result)([work.view(t, layout) for t in result])


_MIXES = {"instance_norm", "local_response_norm", "pixel_shuffle"}
