"""Random functions: ranks that hold the same whole tensor draw the same numbers; ranks that hold a cut draw slices of
one whole draw, so that the result is that of one device, and the trunk's stream stays in step on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Partial, Shard
from meshwright.spmd import redistribute
from meshwright.spmd.alias import contiguous, reach
from meshwright.spmd.comm import Axis
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decide.types import as_autocast, wide
from meshwright.spmd.decision import GATHER, Answer, Decision, use_local, use_replicated
from meshwright.spmd.signature import Call, Operand, layout_of


@decider("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(call: Call) -> Answer:
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
        return Decision(_dropped, (use_replicated(x), _lying(x), p), {})
    args, itself = (use_local(x), _lying(x), p, layout, inplace), x.index if inplace else None
    return Decision(_dropped_slice, args, {}, layout, itself=itself, writes=inplace, axis=True)


def _same(x: Tensor) -> Tensor:
    return x


Lying = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a whole tensor on one device."""


def _lying(x: Operand) -> Lying:
    """How the whole of an operand lies on one device: torch draws in the order of memory."""
    shape = tuple(x.shape)
    return shape, (x.spec.strides or contiguous(shape)) if isinstance(x.layout, Shard) else x.spec.lies


def _memory(lying: Lying, x: Tensor) -> Tensor:
    """Memory for a whole tensor, of the type and device of ``x``."""
    memory = x.new_empty(reach(*lying))
    return memory.as_strided(*lying)


def _dropped(x: Tensor, lying: Lying, p: float) -> Tensor:
    """A whole tensor."""
    return x * functional.dropout(_memory(lying, x).fill_(1), p)


def _dropped_slice(axis: Axis, x: Tensor, lying: Lying, p: float, layout: Shard, inplace: bool) -> Tensor:
    """This rank's slice of a tensor, with its slice of the mask that one device draws."""
    mask = redistribute.keep_slice(functional.dropout(_memory(lying, x).fill_(1), p), axis, layout)
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
    """This rank's slice of ``scaled_dot_product_attention`` with dropout; ``layout`` cuts the dim of heads or of rows.

    A CPU computes such an attention step by step, and draws one mask for all weights: so here, of which each rank takes its
    slice. The kernels of a GPU draw within: there each rank draws from a stream of its own.

    Args:
        mask: of this rank's slice.
        shape: of all weights, on all ranks: (…, queries, keys).
        options: ``dropout_p``, ``is_causal``, ``scale``.
    """
    if query.device.type != "cpu":
        with own_stream(axis, query.device):
            return functional.scaled_dot_product_attention(query, key, value, mask, **options)
    query, key, value, mask = map(as_autocast, (query, key, value, mask))
    with torch.autocast("cpu", enabled=False):
        weights, v = _attention_weights(query, key, value, mask, shape, options)
        drawn = functional.dropout(weights.new_ones(shape), options["dropout_p"])
        return ((weights * redistribute.keep_slice(drawn, axis, layout)) @ v).to(query.dtype)


def _attention_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The weights of this rank's slice before dropout, and the values: both in the type in which torch computes them."""
    q, k, v = (t.to(wide(t.dtype)) for t in (query, key, value))
    scale = options.get("scale")
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale))
    scores = (q * (root if scale is None or scale > 0 else -root)) @ (k * root).transpose(-2, -1)
    if options.get("is_causal"):
        mask = query.new_ones(shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    hidden = (scores == -torch.inf).all(-1, keepdim=True)  # queries to which no key is shown get zeros
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0), v


@contextmanager
def own_stream(axis: Axis, device: torch.device) -> Iterator[None]:
    """A stream of random numbers for this rank alone; the host's common stream moves on by one draw on every rank.

    The seed is drawn on the host: to read one of the device's the host would wait for it, in every layer."""
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
    """A draw of the whole shape, of which a sharded tensor takes its slice."""
    x = call.args[0]
    layout = layout_of(x)
    if not isinstance(layout, Shard):
        return GATHER
    more, named_ones = tuple(map(use_replicated, call.args[1:])), {k: use_replicated(v) for k, v in call.kwargs.items()}
    args = (use_local(x), call.func, _lying(x), layout, *more)
    if call.name.endswith("_like"):
        return Decision(_drawn, args, named_ones, layout, axis=True)
    return Decision(_draw_into, args, named_ones, layout, itself=x.index, writes=True, axis=True)


def _drawn(axis: Axis, x: Tensor, func: Any, lying: Lying, layout: Shard, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's slice of what ``func`` draws for the whole of ``x``."""
    return redistribute.keep_slice(func(_memory(lying, x), *args, **kwargs), axis, layout)


def _draw_into(axis: Axis, x: Tensor, func: Any, lying: Lying, layout: Shard, *args: Any, **kwargs: Any) -> None:
    # With gradients, if they are on: what has been drawn does not depend on what was there.
    x.copy_(_drawn(axis, x, func, lying, layout, *args, **kwargs))
