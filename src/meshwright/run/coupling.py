"""Does the loss of a batch follow from the losses of its pieces? Found out by trying, before the first step.

Data parallelism and microbatches give a rank some of the rows. For most models the loss of all rows is the mean over
pieces, weighed by rows or labels. Not for all: batch statistics, losses that compare rows with each other, means over a
mask, sums. So a few rows are run whole and in two halves, without gradients and without dropout, the halves with the
random numbers that the whole has drawn for their rows, and compared:

    mean       the whole is the weighed mean of the halves      each rank runs its rows
    sum        the whole is the sum of the halves               each rank runs its rows; losses are added
    coupled    neither                                          every rank runs all rows: right, though no faster
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.private import python_body
from meshwright.run.parameters import local_tensor
from meshwright.run.step import rows_of, take_rows

MEAN, SUM, COUPLED = "mean", "sum", "coupled"
MOST_ROWS = 8

# By how much two ways to the same loss may differ, by the type that it is computed in.
# In float64 it is near to rounding (1e-15, as models go): a maximum over all rows may couple them by 1e-11.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

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
    try:
        with torch.no_grad():
            found = _tried(rows, changed, losses)
    except _GradientsAskedError:
        with torch.enable_grad():
            found = _tried(rows, changed, losses)
    tolerance = _TOLERANCE.get(dtype, 2e-2)
    if any(not _alike(a, b, tolerance) for a, b in zip(found.left[0], found.left[1], strict=True)):
        return COUPLED  # what a forward leaves in a buffer, a running mean, follows from the rows that it sees
    whole, *parts = found.losses
    tolerance *= max(1.0, abs(whole))
    if abs(whole - sum(w * x for w, x in zip(found.weights, parts, strict=True))) <= tolerance:
        return MEAN
    return SUM if abs(whole - sum(parts)) <= tolerance else COUPLED


@dataclass
class _Found:
    """What came of forwards of all rows, the first half and the second."""

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of the halves, in their mean
    left: list[list[Tensor]] = field(default_factory=list)  # what each made of what it may change


def _tried(rows: Any, changed: Sequence[Slot], losses: Losses) -> _Found:
    count = rows_of(rows)
    half, found, draws = count // 2, _Found(), Draws(count)
    for spans in ([(0, count)], [(0, half), (half, count)]):
        trials = (_undisturbed(changed, found.left, _Trial(draws, *span)) for span in spans)
        values, found.weights = losses([take_rows(rows, *span) for span in spans], partial(next, trials))
        found.losses += values
    return found


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


@contextmanager
def _undisturbed(changed: Sequence[Slot], left: list[list[Tensor]], trial: _Trial) -> Iterator[None]:
    """Random streams and what a forward changes as they were before."""
    tensors = [getattr(module, name) for module, name in changed]
    values = [t.detach().clone() for t in tensors]
    try:
        with torch.random.fork_rng(_devices()), trial:
            yield
    finally:
        with torch.no_grad():
            left.append([local_tensor(getattr(module, name)).detach().clone() for module, name in changed])
            for (module, name), t, value in zip(changed, tensors, values, strict=True):
                setattr(module, name, t)
                local_tensor(t).copy_(local_tensor(value))


def _devices() -> list[int]:
    """Those whose random streams a forward may move, besides the CPU."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


class _GradientsAskedError(BaseException):
    """The forward asks for gradients (a penalty on them, a hook). Not an Exception, so that a model lets it through."""


_OF_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.register_hook, Tensor.retain_grad)
_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Trial(TorchFunctionMode):
    """The rows from ``start`` to ``stop``: no dropout, their own random numbers of all rows'; and without gradients, an
    error where the forward asks for them."""

    def __init__(self, draws: Draws, start: int, stop: int) -> None:
        super().__init__()
        self._draws, self._span, self._drawn = draws, (start, stop), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _OF_GRADIENTS and not torch.is_grad_enabled():
            raise _GradientsAskedError
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if name in _RECURRENT:
            args = tuple(0.0 if isinstance(a, float) else a for a in args)  # the one is of their dropout
        if getattr(func, "__module__", "") == functional.__name__ and (body := python_body(func)) is not None:
            with self:  # the dropout in an attention of torch's
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _DRAWING and isinstance(result, Tensor) and not result.is_meta:
            self._drawn += 1
            self._draws.align(self._drawn, result, _kind(name, args, kwargs), self._span)
        return result


# --- random numbers ---------------------------------------------------------------------------------------------------

_DRAWING = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal normal_ uniform_ \
     exponential_ geometric_ log_normal_ cauchy_ random_ poisson".split()
)
_WHOLE_NUMBERS = ("randint", "randint_like", "random_", "randperm")


def _kind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same for numbers to be of the same kind: with whole ones their bounds, as they may be of rows."""
    if name == "multinomial":
        return name, (args[0] if args else kwargs["input"]).shape[-1]
    if name not in _WHOLE_NUMBERS:
        return (name,)
    return name, *(a for a in args if isinstance(a, int)), *(kwargs.get(k) for k in ("low", "high", "n", "from", "to"))


class Draws:
    """The random numbers that a forward of all rows drew, in order: a half of them takes those of its rows.

    Numbers of its own would change its loss, and look as though rows were coupled.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

    @torch.no_grad()
    def align(self, i: int, drawn: Tensor, kind: tuple[Any, ...], span: tuple[int, int]) -> None:
        """The i-th draw of the rows in ``span``: kept where these are all rows, else overwritten with what was kept."""
        if span == (0, self._rows):
            self._known[i] = kind, drawn.clone()
        elif i in self._known and self._known[i][0] == kind:
            own = self._of(self._known[i][1], drawn.shape, *span)
            if own is not None:
                drawn.copy_(own)

    def _of(self, every: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor | None:
        """The part of rows ``start`` to ``stop``, of this shape; all of what does not differ with the rows."""
        if every.shape == shape or every.dim() != len(shape):
            return every if every.shape == shape else None
        d, *others = (d for d, size in enumerate(shape) if size != every.shape[d])
        each = every.shape[d] // self._rows
        if others or every.shape[d] != each * self._rows or shape[d] != each * (stop - start):
            return None
        return every.narrow(d, start * each, shape[d])


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
