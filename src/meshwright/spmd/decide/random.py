"""Random functions: the numbers are those of one device.

For a full tensor every rank draws the same numbers. For a sharded tensor every rank draws for the full tensor and keeps
its slice. So the generators of all ranks advance alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Partial, Shard
from meshwright.spmd import patches, redistribute
from meshwright.spmd.alias import contiguous, span
from meshwright.spmd.comm import Axis
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decide.types import as_autocast, sum_dtype
from meshwright.spmd.decision import GATHER, Answer, Decision, use_local, use_replicated
from meshwright.spmd.signature import Call, Operand, layout_of


@decider("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(call: Call) -> Answer:
    """Dropout with the mask of one device: its slice for a sharded tensor, the whole mask for a partial sum."""
    names = named("input p training inplace", call.args, call.kwargs, p=0.5, training=True, inplace=False)
    x, p, inplace = names["input"], names["p"], bool(names["inplace"])
    layout = layout_of(x)
    if not isinstance(layout, (Shard, Partial)):
        return GATHER
    if not names["training"] or p == 0:
        return Decision(_same, (use_local(x),), {}, itself=x.index)
    if call.name != "dropout" or (isinstance(layout, Partial) and inplace):
        return GATHER
    if isinstance(layout, Partial):
        return Decision(_dropped, (use_replicated(x), _shape_and_strides(x), p), {})
    args, itself = (use_local(x), _shape_and_strides(x), p, layout, inplace), x.index if inplace else None
    return Decision(_dropped_slice, args, {}, layout, itself=itself, writes=inplace, axis=True)


def _same(x: Tensor) -> Tensor:
    return x


ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a full tensor on one device."""


def _shape_and_strides(x: Operand) -> ShapeAndStrides:
    """(shape, strides) of the whole operand on one device: torch draws in the order of memory."""
    shape = tuple(x.shape)
    return shape, (x.spec.strides or contiguous(shape)) if isinstance(x.layout, Shard) else x.spec.local_strides


def _memory(geometry: ShapeAndStrides, x: Tensor) -> Tensor:
    """Memory for a full tensor, of the type and device of ``x``."""
    memory = x.new_empty(span(*geometry))
    return memory.as_strided(*geometry)


def _dropped(x: Tensor, geometry: ShapeAndStrides, p: float) -> Tensor:
    """Dropout of a full tensor."""
    return x * functional.dropout(_memory(geometry, x).fill_(1), p)


def _dropped_slice(axis: Axis, x: Tensor, geometry: ShapeAndStrides, p: float, layout: Shard, inplace: bool) -> Tensor:
    """Dropout of this rank's slice of a tensor, by its slice of the mask that one device draws."""
    mask = redistribute.keep_slice(functional.dropout(_memory(geometry, x).fill_(1), p), axis, layout)
    return x.mul_(mask) if inplace else x * mask


def attention_with_dropout(
    axis: Axis,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shape: tuple[int, ...],
    layout: Shard,
    **options: Any,
) -> Tensor:
    """This rank's slice of ``scaled_dot_product_attention`` with dropout; heads or rows are sharded by ``layout``.

    On a CPU torch computes attention with dropout step by step and draws one mask for all weights. This function does the
    same, and each rank keeps its slice of the mask. On a GPU the kernel draws: there each rank has a stream of its own.

    Args:
        query, key, value: this rank's slices, (…, tokens, width).
        mask: this rank's slice of the attention mask.
        shape: the shape of the attention weights of all ranks, (…, queries, keys).
        options: ``dropout_p``, ``is_causal``, ``scale``.
    """
    if query.device.type != "cpu":
        with own_stream(axis, query.device):
            return functional.scaled_dot_product_attention(query, key, value, mask, **options)
    if patches.ATTENTION.active:  # a rehearsal for a GPU
        return patches.ATTENTION.now(query, key, value, mask, **options)
    query, key, value, mask = map(as_autocast, (query, key, value, mask))
    with torch.autocast("cpu", enabled=False):
        weights, v = _attention_weights(query, key, value, mask, shape, options)
        drawn = functional.dropout(weights.new_ones(shape), options["dropout_p"])
        return ((weights * redistribute.keep_slice(drawn, axis, layout)) @ v).to(query.dtype)


def _attention_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(attention weights before dropout, values) of this rank's slice, both in the dtype in which torch computes them."""
    q, k, v = (t.to(sum_dtype(t.dtype)) for t in (query, key, value))
    scale = options.get("scale")
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale))
    scores = (q * (root if scale is None or scale > 0 else -root)) @ (k * root).transpose(-2, -1)
    if options.get("is_causal"):
        mask = query.new_ones(shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    hidden = (scores == -torch.inf).all(-1, keepdim=True)  # queries whose keys are all masked get zeros
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0), v


@contextmanager
def own_stream(axis: Axis, device: torch.device) -> Iterator[None]:
    """While on, this rank draws from a stream of its own. The common stream of the host advances by one draw on every rank.

    The seed is drawn on the host: to read a number of the device, the host would wait for it, in every layer.
    """
    if device.type == "meta":
        yield
        return
    seed = int(torch.randint(2**31, (1,), device="cpu").item())
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + axis.rank)
        yield


@decider("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_", "exponential_", "random_",
      "log_normal_", "cauchy_", "geometric_")  # fmt: skip
def draw(call: Call) -> Answer:
    """Draws for the whole shape; a sharded tensor takes its slice."""
    x = call.args[0]
    layout = layout_of(x)
    if not isinstance(layout, Shard):
        return GATHER
    other_args, keywords = (
        tuple(map(use_replicated, call.args[1:])),
        {k: use_replicated(v) for k, v in call.kwargs.items()},
    )
    args = (use_local(x), call.func, _shape_and_strides(x), layout, *other_args)
    if call.name.endswith("_like"):
        return Decision(_drawn, args, keywords, layout, axis=True)
    return Decision(_draw_into, args, keywords, layout, itself=x.index, writes=True, axis=True)


def _drawn(
    axis: Axis, x: Tensor, func: Any, geometry: ShapeAndStrides, layout: Shard, *args: Any, **kwargs: Any
) -> Tensor:
    """This rank's slice of the numbers that ``func`` draws for the full tensor."""
    return redistribute.keep_slice(func(_memory(geometry, x), *args, **kwargs), axis, layout)


def _draw_into(
    axis: Axis, x: Tensor, func: Any, geometry: ShapeAndStrides, layout: Shard, *args: Any, **kwargs: Any
) -> None:
    # Part of the graph if gradients are on: the drawn numbers do not depend on the old values.
    x.copy_(_drawn(axis, x, func, geometry, layout, *args, **kwargs))
