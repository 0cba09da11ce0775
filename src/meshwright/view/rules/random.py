"""Random functions: ranks that hold the same whole tensor draw the same numbers; ranks that hold a cut draw slices of
one whole draw, so that the result is that of one device, and the trunk's stream stays in step on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Cut, Partial
from meshwright.view.alias import contiguous, reach
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
    whole = func(lying_as(x), *args[1:], **kwargs)
    if func.__name__.endswith("_like"):
        return work.view(work.cut(whole, layout), layout)
    # With gradients, if they are on: what has been drawn does not depend on what was there.
    x._mw_local.copy_(work.cut(whole, layout))
    return x
