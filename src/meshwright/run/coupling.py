"""Does the loss of a batch follow from the losses of its pieces? Found out by trying, before the first step.

Data parallelism and microbatches give a rank some of the rows. For most models the loss of all rows is the mean over
pieces, weighed by rows or labels. Not for all: batch statistics, losses that compare rows with each other, means over a
mask, sums. So a few rows are run whole and in two halves, without gradients and without dropout, and compared:

    mean       the whole is the weighed mean of the halves      each rank runs its rows
    sum        the whole is the sum of the halves               each rank runs its rows; losses are added
    coupled    neither                                          every rank runs all rows: right, though no faster

A forward that leaves something else in a buffer for half of the rows than for all of them couples them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.run.step import rows_of, take_rows

MEAN, SUM, COUPLED = "mean", "sum", "coupled"
MOST_ROWS = 8

# By how much two ways to the same loss may differ, by the type that it is computed in.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}

Losses = Callable[[list[Any]], tuple[list[float], list[float]]]


def how_rows_combine(batch: Any, model: nn.Module, losses: Losses, dtype: torch.dtype) -> str:
    """``mean``, ``sum`` or ``coupled``.

    Args:
        batch: at least two rows; as many on every rank.
        losses: pieces of a batch → (the loss of each, its weight in their mean).
        dtype: what the model computes in.
    """
    rows = take_rows(batch, 0, min(rows_of(batch), MOST_ROWS))
    count = rows_of(rows)
    halves = [take_rows(rows, 0, count // 2), take_rows(rows, count // 2, count)]
    tolerance = _TOLERANCE.get(dtype, 2e-2)
    with _undisturbed(model) as buffers, torch.no_grad():
        (whole,), _ = losses([rows])
        changed = buffers.taken_back()
        parts, weights = losses(halves)
        if buffers:
            buffers.taken_back()
            losses(halves[:1])
        if any(not _alike(a, b, tolerance) for a, b in zip(changed, buffers.taken_back(), strict=True)):
            return COUPLED  # what a forward leaves in a buffer, a running mean, follows from the rows that it sees
    tolerance *= max(1.0, abs(whole))
    if abs(whole - sum(w * x for w, x in zip(weights, parts, strict=True))) <= tolerance:
        return MEAN
    return SUM if abs(whole - sum(parts)) <= tolerance else COUPLED


class _Buffers:
    """The buffers of a model, as they were."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def __len__(self) -> int:
        return len(self._before)

    @torch.no_grad()
    def taken_back(self) -> list[Tensor | None]:
        """What they are by now; and they are again what they were."""
        now = []
        for module, name, buffer, before in self._before:
            found = module._buffers.get(name)  # a model may have put another in its place
            now.append(None if found is None else found.detach().clone())
            module._buffers[name] = buffer
            buffer.copy_(before)
        return now


def _alike(a: Tensor | None, b: Tensor | None, tolerance: float) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return a is b
    if a.is_meta:
        return True
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[_Buffers]:
    """Random streams and buffers as they were before; no dropout meanwhile."""
    buffers = _Buffers(model)
    with torch.random.fork_rng(), _NoDropout():
        yield buffers
    buffers.taken_back()


_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def note(kind: str) -> str:
    """What a person should know of it; empty for the usual case."""
    if kind != COUPLED:
        return ""
    return (
        "this model's loss couples the rows of a batch (batch statistics, rows compared with rows, a mean over a mask): "
        "every data rank runs all rows at once, which is right, and saves memory but no time; "
        "rows: split in the plan gives each its own rows instead"
    )


__all__ = ["COUPLED", "MEAN", "SUM", "how_rows_combine", "note"]
