"""Random functions: ranks that hold the same whole tensor draw the same numbers; ranks that hold a cut draw slices of
one whole draw, so that the result is that of one device, and the trunk's stream stays in step on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Cut, Partial
from meshwright.view import moves
from meshwright.view.alias import contiguous, reach
from meshwright.view.axis import Axis
from meshwright.view.rules.registry import named, rule

if TYPE_CHECKING:
    from meshwright.view.tensor import View


@rule("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("input p training inplace", args, kwargs, p=0.5, training=True, inplace=False)
    x, p = names["input"], names["p"]
    layout = work.layout(x)
    if not isinstance(layout, (Cut, Partial)):
        return NotImplemented
    if not names["training"] or p == 0:
        return x
    if func.__name__ != "dropout" or (isinstance(layout, Partial) and names["inplace"]):
        return NotImplemented
    whole = functional.dropout(lying_as(x).fill_(1), p)
    if isinstance(layout, Partial):
        return work.whole(x) * whole
    mask = work.cut(whole, layout)
    return x.mul_(work.view(mask, layout)) if names["inplace"] else work.view(x._mw_local * mask, layout)


def lying_as(x: View) -> Tensor:
    """Memory for the whole of a View, which lies as the tensor lies on one device: torch draws in the order of memory."""
    like = x._mw_lies()
    strides = like.strides or contiguous(like.shape)
    memory = torch.empty(reach(like.shape, strides), dtype=x.dtype, device=x.device)
    return memory.as_strided(like.shape, strides)


def attention_with_dropout(
    axis: Axis,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shape: tuple[int, ...],
    layout: Cut,
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
    dtype = query.dtype
    q, k, v = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (query, key, value))
    scale = options.get("scale")
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale))
    scores = (q * (root if scale is None or scale > 0 else -root)) @ (k * root).transpose(-2, -1)
    if options.get("is_causal"):
        mask = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    hidden = (scores == -torch.inf).all(-1, keepdim=True)  # queries to which no key is shown get zeros
    weights = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    drawn = functional.dropout(torch.ones(shape, dtype=weights.dtype), options["dropout_p"])
    return ((weights * moves.take(drawn, axis, layout)) @ v).to(dtype)


@contextmanager
def own_stream(axis: Axis, device: torch.device) -> Iterator[None]:
    """A stream of random numbers for this rank alone; the common stream moves on by one draw on every rank."""
    if device.type == "meta":
        yield
        return
    seed = int(torch.randint(2**31, (1,), device=device).item())
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + axis.rank)
        yield


@rule("rand_like", "randn_like", "randint_like", "bernoulli", "normal_", "uniform_", "bernoulli_", "exponential_",
      "random_", "log_normal_", "cauchy_", "geometric_", "poisson", "multinomial")  # fmt: skip
def draw(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A draw of the whole shape, of which a cut tensor takes its slice."""
    x = args[0]
    layout = work.layout(x)
    if not isinstance(layout, Cut) or func.__name__ in ("bernoulli", "poisson", "multinomial"):
        return NotImplemented
    whole = func(lying_as(x), *args[1:], **kwargs)
    if func.__name__.endswith("_like"):
        return work.view(work.cut(whole, layout), layout)
    # With gradients, if they are on: what has been drawn does not depend on what was there.
    x._mw_local.copy_(work.cut(whole, layout))
    return x
