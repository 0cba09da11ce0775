"""``TrialForward``: the mode of a forward in a trial, of all rows or of some of them: without dropout, and with the random
numbers that the forward of all rows drew for these rows.

With other numbers a part would have another loss, as if its rows were coupled with the rest.
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
    """The forward computes gradients (a gradient penalty, a hook). Not an Exception, so that no model catches it."""


_OF_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.register_hook, Tensor.retain_grad)
_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class TrialForward(FunctionMode):
    """A forward of the rows ``start`` to ``stop``: without dropout, and with their part of the random numbers of all rows.

    Raises ``GradientsAskedError`` if the forward computes gradients while they are off.
    """

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
            args = tuple(0.0 if isinstance(a, float) else a for a in args)  # the only float among them is the dropout
        if getattr(func, "__module__", "") == functional.__name__ and (body := python_body(func)) is not None:
            with self:  # sees the dropout within torch's own attention
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _DRAWING and isinstance(result, Tensor) and not result.is_meta:
            self._drawn += 1
            self._numbers.align(self._drawn, result, _kind(name, args, kwargs), self._span)
        return result


def _has_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first argument has a graph: a model may switch gradients off, and then compute those of earlier results."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(first))


# --- random numbers ---------------------------------------------------------------------------------------------------

_DRAWING = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal normal_ uniform_ \
     exponential_ geometric_ log_normal_ cauchy_ random_ poisson".split()
)
_WHOLE_NUMBERS = ("randint", "randint_like", "random_", "randperm")


def _kind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal in two draws so that one may have the numbers of the other. For integers this includes the bounds,
    which may be numbers of rows."""
    if name == "multinomial":
        return name, (args[0] if args else kwargs["input"]).shape[-1]
    if name not in _WHOLE_NUMBERS:
        return (name,)
    return name, *(a for a in args if isinstance(a, int)), *(kwargs.get(k) for k in ("low", "high", "n", "from", "to"))


class DrawnNumbers:
    """The random numbers that a forward of all rows drew, in order; a forward of some rows takes the numbers of its rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

    @torch.no_grad()
    def align(self, i: int, drawn: Tensor, kind: tuple[Any, ...], span: tuple[int, int]) -> None:
        """Handles draw number ``i`` of a forward of the rows in ``span``. If these are all rows, its numbers are kept; else it
        is overwritten with the kept numbers of these rows."""
        if span == (0, self._rows):
            self._known[i] = kind, drawn.clone()
        elif i in self._known and self._known[i][0] == kind:
            numbers = self._of(self._known[i][1], drawn.shape, *span)
            if numbers is not None:
                drawn.copy_(numbers)

    def _of(self, numbers: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor | None:
        """The part of ``numbers`` for rows ``start`` to ``stop``, of this shape; all of them if the shape does not depend on
        rows; None if no dim has a size in proportion to rows."""
        if numbers.shape == shape or numbers.dim() != len(shape):
            return numbers if numbers.shape == shape else None
        d, *others = (d for d, size in enumerate(shape) if size != numbers.shape[d])
        if not others and stop == 2 * self._rows and shape[d] == 2 * numbers.shape[d]:
            return torch.cat([numbers, numbers], d)
        per_row = numbers.shape[d] // self._rows
        if others or numbers.shape[d] != per_row * self._rows or shape[d] != per_row * (stop - start):
            return None
        return numbers.narrow(d, start * per_row, shape[d])
