"""``TrialForward``: the function mode of a forward in a trial. The forward has no dropout, and a forward of some rows gets the
random numbers that the forward of all rows drew for these rows.

With other random numbers a part would have another loss, as if its rows were coupled with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.private import python_body, pytree
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.decide.gradient import RECOMPUTING


class GradientsAskedError(BaseException):
    """The forward computes gradients (for a gradient penalty, by a hook). It is no Exception, so that no model catches it."""


_OF_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.register_hook, Tensor.retain_grad)
_DROPOUTS = {
    getattr(functional, name)
    for name in "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class TrialForward(FunctionMode):
    """A forward of rows ``start`` to ``stop``, without dropout, and with random numbers from the forward of all rows.

    Raises GradientsAskedError if the forward computes gradients while they are off.

    Args:
        numbers: the random numbers of the forward of all rows.
    """

    def __init__(self, numbers: DrawnNumbers, start: int, stop: int) -> None:
        super().__init__()
        self._numbers = numbers
        self._span = start, stop
        self._draws = 0  # the number of draws so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _OF_GRADIENTS and not torch.is_grad_enabled() and not _has_graph(args, kwargs):
            raise GradientsAskedError
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        if name in _RECURRENT:
            args = tuple(0.0 if isinstance(a, float) else a for a in args)  # the only float among them is the dropout
        if func in RECOMPUTING or getattr(func, "__module__", "") == functional.__name__:
            body = python_body(func)
            if body is not None:
                # The trial's modes stay on for the dropout in torch's own attention, and for what a backward recomputes.
                with self:
                    return body(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _DRAWING and isinstance(result, Tensor) and not result.is_meta:
            self._draws += 1
            self._numbers.align(self._draws, result, _kind(name, args, kwargs), self._span)
        return result


def _has_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first argument has a graph. Then the model has switched gradients off itself, later than this argument."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(first))


# --- random numbers ---------------------------------------------------------------------------------------------------

_DRAWING = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial normal normal_ uniform_ \
     exponential_ geometric_ log_normal_ cauchy_ random_ poisson".split()
)
_WHOLE_NUMBERS = ("randint", "randint_like", "random_", "randperm")


def _kind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The kind of a draw. A draw may use the numbers of another draw of the same kind. For integers the bounds are part of the
    kind, as they may be numbers of rows."""
    if name == "multinomial":
        return name, (args[0] if args else kwargs["input"]).shape[-1]
    if name not in _WHOLE_NUMBERS:
        return (name,)
    bounds = [a for a in args if isinstance(a, int)]
    named_bounds = [kwargs.get(key) for key in ("low", "high", "n", "from", "to")]
    return name, *bounds, *named_bounds


class DrawnNumbers:
    """The random numbers that a forward of all rows drew, in order. A forward of some rows gets the numbers of its rows.

    Args:
        rows: the number of all rows.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._draws_of_all: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

    @torch.no_grad()
    def align(self, i: int, drawn: Tensor, kind: tuple[Any, ...], span: tuple[int, int]) -> None:
        """Called after each draw of a forward. Stores the drawn numbers if the forward has all rows. Else overwrites them with
        the stored numbers of its rows.

        Args:
            i: the number of the draw in its forward.
            drawn: the drawn numbers.
            kind: see ``_kind``.
            span: (start, stop) of the rows of the forward.
        """
        if span == (0, self._rows):
            self._draws_of_all[i] = kind, drawn.clone()
        elif i in self._draws_of_all and self._draws_of_all[i][0] == kind:
            numbers = self._of(self._draws_of_all[i][1], drawn.shape, *span)
            if numbers is not None:
                drawn.copy_(numbers)

    def _of(self, numbers: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor | None:
        """The numbers of rows ``start`` to ``stop``, in this shape. All numbers if the shape does not depend on rows; None if
        no dim has a size in proportion to rows."""
        if numbers.shape == shape:
            return numbers
        if numbers.dim() != len(shape):
            return None
        d, *others = (d for d, size in enumerate(shape) if size != numbers.shape[d])
        if not others and stop == 2 * self._rows and shape[d] == 2 * numbers.shape[d]:
            return torch.cat([numbers, numbers], d)
        per_row = numbers.shape[d] // self._rows
        if others or numbers.shape[d] != per_row * self._rows or shape[d] != per_row * (stop - start):
            return None
        return numbers.narrow(d, start * per_row, shape[d])
