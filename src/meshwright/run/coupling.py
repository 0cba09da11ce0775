"""Does the loss of a batch follow from the losses of its pieces? Found out by trying, before the first step.

Data parallelism and microbatches give a rank some of the rows. For most models the loss of all rows is the mean over
pieces, weighed by rows or labels. Not for all: batch statistics, losses that compare rows with each other, means over a
mask, sums. So a few rows are run whole and in two halves, without gradients and without dropout, and compared:

    mean       the whole is the weighed mean of the halves      each rank runs its rows
    sum        the whole is the sum of the halves               each rank runs its rows; losses are added
    coupled    neither                                          every rank runs all rows: right, though no faster
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.run.parameters import local_tensor
from meshwright.run.step import rows_of, take_rows

MEAN, SUM, COUPLED = "mean", "sum", "coupled"
MOST_ROWS = 8

# By how much two ways to the same loss may differ, by the type that it is computed in.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}

Trial = Callable[[], AbstractContextManager[None]]
Losses = Callable[[list[Any], Trial], tuple[list[float], list[float]]]
Slot = tuple[nn.Module, str]  # where a module keeps a tensor, as a forward may put another in its place


def how_rows_combine(batch: Any, changed: Sequence[Slot], losses: Losses, dtype: torch.dtype) -> str:
    """``mean``, ``sum`` or ``coupled``.

    Args:
        batch: at least two rows; as many on every rank.
        changed: what a forward may change, buffers, parameters that it writes: by where its module keeps it.
        losses: pieces of a batch, and a context for each forward → (the loss of each piece, its weight in their mean).
        dtype: what the model computes in.
    """
    rows = take_rows(batch, 0, min(rows_of(batch), MOST_ROWS))
    count = rows_of(rows)
    halves = [take_rows(rows, 0, count // 2), take_rows(rows, count // 2, count)]
    left: list[list[Tensor]] = []  # what each forward made of what it may change
    trial = partial(_undisturbed, changed, left)
    try:
        with torch.no_grad():
            (whole,), _ = losses([rows], trial)
            parts, weights = losses(halves, trial)
    except _GradientsAskedError:
        left.clear()
        with torch.enable_grad():
            (whole,), _ = losses([rows], trial)
            parts, weights = losses(halves, trial)
    tolerance = _TOLERANCE.get(dtype, 2e-2)
    if any(not _alike(a, b, tolerance) for a, b in zip(left[0], left[1], strict=True)):
        return COUPLED  # what a forward leaves in a buffer, a running mean, follows from the rows that it sees
    tolerance *= max(1.0, abs(whole))
    if abs(whole - sum(w * x for w, x in zip(weights, parts, strict=True))) <= tolerance:
        return MEAN
    return SUM if abs(whole - sum(parts)) <= tolerance else COUPLED


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


@contextmanager
def _undisturbed(changed: Sequence[Slot], left: list[list[Tensor]]) -> Iterator[None]:
    """Random streams and what a forward changes as they were before; no dropout meanwhile."""
    tensors = [getattr(module, name) for module, name in changed]
    values = [t.detach().clone() for t in tensors]
    try:
        with torch.random.fork_rng(), _Trial():
            yield
    finally:
        with torch.no_grad():
            left.append([local_tensor(getattr(module, name)).detach().clone() for module, name in changed])
            for (module, name), t, value in zip(changed, tensors, values, strict=True):
                setattr(module, name, t)
                local_tensor(t).copy_(local_tensor(value))


_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}


class _GradientsAskedError(BaseException):
    """The forward asks for gradients (a penalty on them, a hook). Not an Exception, so that a model lets it through."""


_OF_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.register_hook, Tensor.retain_grad)


class _Trial(TorchFunctionMode):
    """No dropout; and without gradients, an error where the forward asks for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OF_GRADIENTS and not torch.is_grad_enabled():
            raise _GradientsAskedError
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


__all__ = ["COUPLED", "MEAN", "SUM", "Trial", "how_rows_combine", "note"]
