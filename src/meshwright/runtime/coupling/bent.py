"""``Bent``: a forward in which no function has a straight piece.

A trial compares the loss of all rows with those of their parts at one place. A function like ``relu`` or ``clamp`` is straight
on either side of its corner. What it gives of a number of all rows (a penalty above a threshold, ``kl.mean().clamp(min=0.5)``)
is, while all parts lie on one side, the mean of what it gives of theirs, and in a later step it is not.

So in one attempt of a trial what such functions give is bent a little, everywhere. Of values of single rows it still is of
single rows, and the parts make the whole as before. Of a number of all rows they do not.

Only what follows from parameters is bent: a count of labels, ``mask.sum().clamp(min=1)``, is known exactly (LabelCounter).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.private import pytree
from meshwright.runtime.coupling.float64 import wide
from meshwright.runtime.coupling.tensor_set import TensorSet, is_parameter, tensors_given
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.torch_functions import writes

_BEND = 0.01  # how much of a value it is bent by at most

_OF_ONE = frozenset(
    "relu relu_ relu6 clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ abs abs_ absolute absolute_ __abs__ \
     sign sign_ sgn sgn_ leaky_relu leaky_relu_ prelu rrelu rrelu_ elu elu_ selu selu_ celu celu_ threshold threshold_ \
     hardtanh hardtanh_ hardsigmoid hardswish hardshrink softshrink".split()
)
_OF_TWO = frozenset("maximum minimum fmax fmin".split())
_PICKS = frozenset("max min amax amin aminmax topk sort msort median nanmedian kthvalue quantile nanquantile".split())
_LOSSES = frozenset("l1_loss smooth_l1_loss huber_loss".split())


@dataclass(frozen=True)
class Met:
    """A function with a corner that was met.

    Attributes:
        line: of the model.
        shape: of what the function was given; total: its sum.
    """

    line: str
    shape: tuple[int, ...]
    total: Tensor


@contextmanager
def bent(forwards: list[list[Met]]) -> Iterator[None]:
    """For the time of a forward, which computes in float64 at weights moved off their values (float64.py)."""
    mode = Bent()
    forwards.append(mode.met)
    with wide(perturbed=True), mode:
        yield


def line_of_all_rows(forwards: Sequence[Sequence[Met]]) -> str:
    """The first line at which a function with a corner was given something of all rows: as large in a forward of some of
    them, and not the same. Empty if there is none.

    Args:
        forwards: of all rows, and of some.
    """
    whole, part = forwards[0], forwards[1]
    for a, b in zip(whole, part, strict=False):
        if a.line == b.line and a.shape == b.shape and not torch.allclose(a.total, b.total, rtol=1e-12, atol=0.0):
            return a.line
    return ""


class Bent(FunctionMode):
    """Bends what functions with corners give, of values that follow from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[Met] = []
        self._trained = TensorSet()  # those that follow from parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not any(map(self._follows, tensors_given(args, kwargs))):
            return func(*args, **kwargs)
        at = self._bent_at(name, args, kwargs)
        result = func(*args, **kwargs)
        if at is not None or name in _PICKS:
            result = self._bent(name, result, at, args, kwargs)
        self._trained.add(pytree.tree_leaves(result))
        if args and isinstance(args[0], Tensor) and writes(func, args, kwargs):
            self._trained.add([args[0]])
        return result

    def _follows(self, t: Tensor) -> bool:
        """Whether a tensor follows from parameters. What a stage receives says so itself."""
        return t in self._trained or is_parameter(t) or t.requires_grad

    def _bent_at(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What decides on which side of its corner a function is, before it writes to it; None if it has no corner."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in _OF_ONE and _is_bendable(given[0]):
            return given[0].detach().clone()
        if (name in _OF_TWO or name in _LOSSES or name in ("max", "min")) and len(given) >= 2:
            return (given[0] - given[1]).detach() if all(map(_is_bendable, given[:2])) else None
        if name == "where" and len(given) == 3 and given[0].dim() and self._follows(given[0]):
            return (given[1] - given[2]).detach() if all(map(_is_bendable, given[1:])) else None
        return None

    def _bent(self, name: str, result: Any, at: Tensor | None, args: Any, kwargs: dict[str, Any]) -> Any:
        """A result of a function with a corner, bent."""
        if at is not None:
            self.met.append(Met(model_line(), tuple(at.shape), at.double().sum()))
        if name in _LOSSES:
            assert at is not None
            return result + _BEND * _reduced(_bump(at), result, args, kwargs)
        if at is not None and result is args[0]:  # written in place
            with torch.no_grad():
                return result.copy_(_bend(result.detach().clone(), at))
        return pytree.tree_map(lambda t: _bend(t, t if at is None else at) if _is_bendable(t) else t, result)


def _is_bendable(t: Any) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.is_floating_point() and not t.is_meta


def _bump(at: Tensor) -> Tensor:
    """A function of each element that is straight nowhere, and small far off."""
    return 1 / (1 + at.square())


def _bend(t: Tensor, at: Tensor) -> Tensor:
    """Of the same sign, and no larger, so that it stays where the next function is defined."""
    bump = _BEND * _bump(at)
    return torch.where(t == 0, bump.to(t.dtype), t * (1 - bump).to(t.dtype))


def _reduced(each: Tensor, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a loss makes of its elements, as its arguments say."""
    if like.shape == each.shape:
        return each
    summed = "sum" in (*args, kwargs.get("reduction")) or args[2:3] == (2,)
    return each.sum() if summed else each.mean()
