"""Random functions: ranks that hold the same whole tensor draw the same numbers; ranks that hold a cut draw slices of
one whole draw, so that the result is that of one device, and the trunk's stream stays in step on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from meshwright.layout import Cut, Partial
from meshwright.view.rules.registry import named, rule


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
    # Torch draws in the order of memory: a transposed tensor's mask is the transpose of a draw.
    strides = x._mw_local.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    ones = torch.ones([x.shape[d] for d in order], dtype=x.dtype, device=x.device)
    ones = ones.permute([order.index(d) for d in range(x.dim())])
    whole = functional.dropout(ones, p)
    if isinstance(layout, Partial):
        return work.whole(x) * whole
    mask = work.cut(whole, layout)
    return x.mul_(work.view(mask, layout)) if names["inplace"] else work.view(x._mw_local * mask, layout)


@contextmanager
def own_stream(work: Any, device: torch.device) -> Iterator[None]:
    """A stream of random numbers for this rank alone; the common stream moves on by one draw on every rank."""
    if device.type == "meta":
        yield
        return
    seed = int(torch.randint(2**31, (1,), device=device).item())
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + work.axis.rank)
        yield


@rule("rand_like", "randn_like", "randint_like", "bernoulli", "normal_", "uniform_", "bernoulli_", "exponential_",
      "random_", "log_normal_", "cauchy_", "geometric_", "poisson", "multinomial")  # fmt: skip
def draw(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A draw of the whole shape, of which a cut tensor takes its slice."""
    x = args[0]
    layout = work.layout(x)
    if not isinstance(layout, Cut) or func.__name__ in ("bernoulli", "poisson", "multinomial"):
        return NotImplemented
    whole = torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    if func.__name__.endswith("_like"):
        return work.view(work.cut(func(whole, *args[1:], **kwargs), layout), layout)
    with torch.no_grad():
        x._mw_local.copy_(work.cut(func(whole, *args[1:], **kwargs), layout))
    return x
