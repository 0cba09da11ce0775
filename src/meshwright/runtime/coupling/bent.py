"""``Bent``: a forward in which nothing is straight, and nothing hides from the loss.

A trial compares the loss of all rows with those of their parts, at one place. Three things of a number of all rows (a mean) are
not seen so; in one attempt they are made to show:

    a corner        a function like ``clamp`` is straight on either side of it. ``kl.mean().clamp(min=0.5)`` is, while all parts
                    lie on one side, the mean of what it gives of theirs, and in a later step it is not. What functions with
                    corners give is bent a little.
    a stop          in ``a + b * (a / b).detach()`` the number changes gradients, and not the loss. What is taken without its
                    gradient is bent a little where it is used.
    a comparison    ``m * (m > 0.5)``. It may come out otherwise in a later step: it is turned round. If the loss is another
                    then, the rows are coupled.

Of values of single rows, what is bent still is of single rows, and the parts make the whole as before. Of a number of all rows
it does not. What follows from parameters is bent in every function with a corner. Of what follows from the fractions of the
batch alone, only numbers of all rows are, in a further attempt: the counter (LabelCounter) divides by ``y.abs().mean()`` as it
is. What follows from its whole numbers (ids, labels, masks) is not bent: ``mask.sum().clamp(min=1)`` is known exactly.
What Python reads of a comparison, ``Paths`` watches in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.private import has_gradient, pytree, without_modes
from meshwright.runtime.coupling.float64 import wide
from meshwright.runtime.coupling.own_backward import Changed, own_backward
from meshwright.runtime.coupling.paths import AS_MANY_AS_FIT, COMPARES, picks
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter, tensors_given
from meshwright.runtime.rows.batch import tensors_in
from meshwright.spmd.autograd_functions import (
    FunctionMode,
    own_functions_noted,
    transformed_functions,
    transforming,
)
from meshwright.spmd.torch_functions import NUMBERS, YES_OR_NO, aliases, is_fact, writes

_BEND = 0.01  # how much of a value it is bent by at most

_OF_ONE = frozenset(
    "relu relu_ relu6 clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ abs abs_ absolute absolute_ __abs__ \
     sign sign_ sgn sgn_ leaky_relu leaky_relu_ prelu rrelu rrelu_ elu elu_ selu selu_ celu celu_ threshold threshold_ \
     hardtanh hardtanh_ hardsigmoid hardswish hardshrink softshrink".split()
)
_OF_TWO = frozenset("maximum minimum fmax fmin max min".split())  # of two tensors
_PICKS = frozenset("max min amax amin aminmax topk sort msort median nanmedian kthvalue quantile nanquantile".split())
_LOSSES = frozenset("l1_loss smooth_l1_loss huber_loss".split())


@dataclass
class Met:
    """A function with a corner, or a comparison, that was met.

    Attributes:
        line: of the model.
        shape: of what the function was given; total: its sum.
        read: whether Python was told what came of it.
    """

    line: str
    shape: tuple[int, ...]
    total: Tensor
    read: bool = False


@contextmanager
def bent(
    model: nn.Module, forwards: list[Bent], turned: Collection[int] = (), of_batch: Collection[int] = ()
) -> Iterator[None]:
    """For the time of a forward, which computes in float64 at weights moved off their values (float64.py).

    Args:
        forwards: takes the mode of this forward, if it comes to its end: one that asks for gradients begins anew with them.
        turned: the comparisons that come out the other way, as counted in an earlier forward.
        of_batch: the functions with corners that are bent of those that were given values of the batch alone.
    """
    mode = Bent(turned, of_batch)
    handle = model.register_forward_pre_hook(mode.entered, with_kwargs=True)
    try:
        unseen = own_functions_noted(mode.moved), transformed_functions(mode.transformed)
        with wide(perturbed=True), mode, unseen[0], unseen[1], own_backward(model, mode.gradients):
            yield
    finally:
        handle.remove()
    forwards.append(mode)


def of_all_rows(whole: Sequence[Met], part: Sequence[Met]) -> list[int]:
    """Which of those met in a forward of all rows were given a number of all rows: as large in a forward of some of them,
    and not the same."""
    pairs = enumerate(zip(whole, part, strict=False))
    return [
        i for i, (a, b) in pairs
        if a.line == b.line and a.shape == b.shape and not torch.allclose(a.total, b.total, rtol=1e-12, atol=0.0)
    ]  # fmt: skip


class Bent(FunctionMode):
    """Bends what functions with corners give, and what is taken without gradient, of values that follow from parameters.

    Attributes:
        corners: that were met; corners_of_batch: those of values of the batch alone; compared: the comparisons.
        gradients: what hooks and Functions of the model's own made of some.
    """

    def __init__(self, turned: Collection[int] = (), of_batch: Collection[int] = ()) -> None:
        super().__init__()
        self.corners: list[Met] = []
        self.corners_of_batch: list[Met] = []
        self.compared: list[Met] = []
        self.gradients: list[Changed] = []
        self._turned, self._bent_of_batch = turned, of_batch
        self._trained = TensorTable[bool]()  # those that follow from parameters
        self._fractions = TensorTable[bool]()  # those that follow from fractions of the batch
        self._told = TensorTable[frozenset[int]]()  # those that follow from comparisons, and which
        self._in_transform = False  # whether a transform of torch.func has met what follows from parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = list(tensors_given(args, kwargs))
        if is_fact(func):
            return func(*args, **kwargs)
        if transforming():
            self._in_transform = self._in_transform or any(map(self._follows, tensors))
            if (
                self._in_transform
            ):  # the tensors in it are other ones than those outside: all of them may follow from these
                args, kwargs = self._without_stops(func, args, kwargs, written=writes(func, args, kwargs))
            return func(*args, **kwargs)
        told = self._read_of(func, name, args, tensors)
        if not any(map(self._follows, tensors)):
            return self._of_batch(func, name, args, kwargs, tensors, told)
        written = writes(func, args, kwargs)
        args, kwargs = self._without_stops(func, args, kwargs, written=written)
        result = self._called(func, name, args, kwargs)
        made = [*pytree.tree_leaves(result), *(args[:1] if written else ())]
        self._trained.note(made, True)
        if name in COMPARES and isinstance(result, Tensor):
            result = self._turned_round(result, args, told)
            self._trained.note([result], True)
        elif told:
            self._told.note(made, told)
        return result

    def _read_of(self, func: Any, name: str, args: Any, tensors: Sequence[Tensor]) -> frozenset[int]:
        """Which comparisons a call's tensors follow from. If it tells Python, these are read."""
        told: frozenset[int] = frozenset().union(*filter(None, map(self._told.of, tensors)))
        if told and (name in YES_OR_NO or name in NUMBERS or name in AS_MANY_AS_FIT or picks(name, args)):
            for i in told:
                self.compared[i].read = True
        return told

    def _follows(self, t: Tensor) -> bool:
        """Whether a tensor follows from parameters. All that a stage receives does."""
        return t in self._trained or is_parameter(t) or t.requires_grad or getattr(t, "_mw_received", False)

    def moved(self, result: Any, args: tuple[Any, ...]) -> None:
        """A collective's result follows from what its operand follows from."""
        operand = args[0] if args else None
        if not isinstance(operand, Tensor):
            return
        made = pytree.tree_leaves(result)
        if operand in self._trained:
            self._trained.note(made, True)
        if operand in self._fractions:
            self._fractions.note(made, True)
        if told := self._told.of(operand):
            self._told.note(made, told)

    def transformed(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a transform of ``torch.func`` gives follows from parameters if what it is given does, or what it meets."""
        if transforming():  # (the one around it tells)
            return call(*args, **kwargs)
        self._in_transform = any(self._follows(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        result = call(*args, **kwargs)
        if self._in_transform:
            self._trained.note(pytree.tree_leaves(result), True)
        return result

    # --- the batch ----------------------------------------------------------------------------------------------------

    def entered(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called with a batch."""
        with without_modes():
            self._fractions.note(filter(_has_fractions, tensors_in((args, kwargs))), True)

    def _of_batch(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        told: frozenset[int],
    ) -> Any:
        """A function of what does not follow from parameters."""
        if not any(t in self._fractions for t in tensors):
            result = func(*args, **kwargs)
            if told:
                self._told.note(pytree.tree_leaves(result), told)
            return result
        at = self._decides(name, args, kwargs)
        result = func(*args, **kwargs)
        if name in COMPARES and isinstance(result, Tensor):
            return self._turned_round(result, args, told)
        if at is not None:
            self.corners_of_batch.append(_met(at))
            if len(self.corners_of_batch) - 1 in self._bent_of_batch:
                result = self._bent_at(at, name, result, args, kwargs)
        made = [*pytree.tree_leaves(result), *(args[:1] if writes(func, args, kwargs) else ())]
        self._fractions.note(filter(_is_bendable, made), True)
        if told:
            self._told.note(made, told)
        return result

    # --- stops --------------------------------------------------------------------------------------------------------

    def _without_stops(self, func: Any, args: Any, kwargs: Any, *, written: bool) -> Any:
        """Arguments, of which those are bent that follow from parameters and have no gradient, if the function's result has
        one; but for what the function writes to. A view is bent where it is used: what is written to it is written to what it
        is a view of (``k.new_empty(shape)[..., :8].copy_(k)``)."""
        if not torch.is_grad_enabled() or aliases(func):
            return args, kwargs
        kept = args[:1] if written else ()
        more, named = pytree.tree_map(self._unstopped, (args[len(kept) :], kwargs))
        return (*kept, *more), named

    def _unstopped(self, x: Any) -> Any:
        if not _is_bendable(x) or has_gradient(x) or is_parameter(x) or not (transforming() or self._follows(x)):
            return x
        bent_value = _bend_stop(x)
        self._trained.note([bent_value], True)
        return bent_value

    # --- comparisons --------------------------------------------------------------------------------------------------

    def _turned_round(self, result: Tensor, args: tuple[Any, ...], told: frozenset[int]) -> Tensor:
        """What a comparison gave, or the other way. It follows from comparisons that were ``told``, and from itself."""
        number, (a, b) = len(self.compared), args[:2]
        self.compared.append(_met(a - b if _is_bendable(a) else a))
        result = ~result if number in self._turned else result
        self._told.note([result], told | {number})
        return result

    # --- corners ------------------------------------------------------------------------------------------------------

    def _called(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives, bent if it has a corner."""
        if name in NUMBERS:
            number = func(*args, **kwargs)
            return float(_bend_stop(torch.tensor(number).double())) if isinstance(number, float) else number
        at = self._decides(name, args, kwargs)
        result = func(*args, **kwargs)
        if at is None:
            return pytree.tree_map(lambda t: _bend(t, t), result) if name in _PICKS else result
        self.corners.append(_met(at))
        return self._bent_at(at, name, result, args, kwargs)

    def _bent_at(self, at: Tensor, name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function with a corner gave, bent."""
        if name in _LOSSES:
            return result + _BEND * _reduced(_bump(at), result, args, kwargs)
        if args and result is args[0]:  # written in place
            with torch.no_grad():
                return result.copy_(_bend(result.detach().clone(), at))
        return _bend(result, at)

    def _decides(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What decides on which side of its corner a function is, before it writes to it; None if it has no corner."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in _OF_ONE and _is_bendable(tensors[0]):
            return tensors[0].detach().clone()
        if (name in _OF_TWO or name in _LOSSES) and len(tensors) >= 2:
            return (tensors[0] - tensors[1]).detach() if all(map(_is_bendable, tensors[:2])) else None
        if name == "where" and len(tensors) == 3 and tensors[0].dim() and self._follows(tensors[0]):
            return (tensors[1] - tensors[2]).detach() if all(map(_is_bendable, tensors[1:])) else None
        return None


def _met(at: Tensor) -> Met:
    return Met(model_line(), tuple(at.shape), at.detach().double().sum())


def _is_bendable(t: Any) -> bool:
    plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_nested
    return plain and t.is_floating_point() and not t.is_meta


def _has_fractions(t: Tensor) -> bool:
    return _is_bendable(t) and not torch.equal(t, t.round())


def _bump(at: Tensor) -> Tensor:
    """A function of each element that is straight nowhere, and small far off."""
    return 1 / (1 + at.square())


def _bend(t: Any, at: Any) -> Any:
    """Of the same sign, and no larger, so that it stays where the next function is defined. What has no fractions stays."""
    if not _is_bendable(t):
        return t
    bump = _BEND * _bump(at)
    return torch.where(t == 0, bump.to(t.dtype), t * (1 - bump).to(t.dtype))


def _bend_stop(t: Tensor) -> Tensor:
    """The same for a value that may be far from any corner: a sum over many rows is bent by as much of it as a mean. What is
    infinite stays."""
    wave = 0.5 * _BEND * (1 + torch.sin(torch.log1p(t.abs()).clamp(max=1e3)))
    return torch.where(t == 0, _BEND, t * (1 - wave)).to(t.dtype)


def _reduced(each: Tensor, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a loss makes of its elements, as its arguments say."""
    if like.shape == each.shape:
        return each
    summed = "sum" in (*args, kwargs.get("reduction")) or args[2:3] == (2,)
    return each.sum() if summed else each.mean()
