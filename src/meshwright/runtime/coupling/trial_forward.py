"""``TrialForward``: a forward of a trial, of all rows or of some: no dropout, and of random numbers those that a forward of all
rows drew for these rows.

Numbers of its own would change a part's loss, and look as though rows were coupled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.private import python_body, pytree
from meshwright.spmd.autograd_functions import FunctionMode


class GradientsAskedError(BaseException):
    """The forward asks for gradients (a penalty on them, a hook). Not an Exception, so that a model lets it through."""


_OF_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.register_hook, Tensor.retain_grad)
_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class TrialForward(FunctionMode):
    """The rows from ``start`` to ``stop``: no dropout, their own random numbers of all rows'; and without gradients, an
    error where the forward asks for them."""

    def __init__(self, numbers: DrawnNumbers, start: int, stop: int) -> None:
        super().__init__()
        self._numbers, self._span, self._drawn = numbers, (start, stop), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _OF_GRADIENTS and not torch.is_grad_enabled() and not _has_graph(args, kwargs):
            raise GradientsAskedError
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
            self._numbers.align(self._drawn, result, _kind(name, args, kwargs), self._span)
        return result


def _has_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether gradients can be asked of what is first: a model may turn them off itself, and ask for those of before."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(first))


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


class DrawnNumbers:
    """The random numbers that a forward of all rows drew, in order: a half of them takes those of its rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

    @torch.no_grad()
    def align(self, i: int, drawn: Tensor, kind: tuple[Any, ...], span: tuple[int, int]) -> None:
        """The i-th draw of the rows in ``span``: kept where these are all rows, else overwritten with what was kept."""
        if span == (0, self._rows):
            self._known[i] = kind, drawn.clone()
        elif i in self._known and self._known[i][0] == kind:
            numbers = self._of(self._known[i][1], drawn.shape, *span)
            if numbers is not None:
                drawn.copy_(numbers)

    def _of(self, every: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor | None:
        """The part of rows ``start`` to ``stop``, of this shape; all of what does not differ with the rows."""
        if every.shape == shape or every.dim() != len(shape):
            return every if every.shape == shape else None
        d, *others = (d for d, size in enumerate(shape) if size != every.shape[d])
        if not others and stop == 2 * self._rows and shape[d] == 2 * every.shape[d]:
            return torch.cat([every, every], d)
        each = every.shape[d] // self._rows
        if others or every.shape[d] != each * self._rows or shape[d] != each * (stop - start):
            return None
        return every.narrow(d, start * each, shape[d])
