"""``BendingMode``: a function mode that changes values of a trial a little, so that the loss shows how the model uses them.

A trial compares the loss of all rows with the losses of parts, at one point: for one batch, and for one set of weights. There
are four uses of a number of all rows (a mean) that these losses do not show. In one attempt this mode makes them show:

    a corner        A function like ``clamp`` is linear on both sides of its corner. As long as all parts are on one side,
                    ``kl.mean().clamp(min=0.5)`` of all rows is the mean over the parts; in a later step it may not be. So the
                    mode bends the results of functions with corners: it changes them a little, in a curved way.
                    What picks (``max``, ``topk``) has a corner where another value is the largest: its results are bent by
                    all values from which they were picked.
    a stop          In ``a + b * (a / b).detach()`` the number changes gradients, but not the loss. The mode bends a value that
                    is used without its gradient.
    a write         After ``h.data.zero_()`` the loss does not show what becomes of the gradient of ``h``. The mode bends the
                    new value by the old one.
    a comparison    ``m * (m > 0.5)`` may have another result in a later step. The mode reverses the comparison. If the loss
                    changes, the rows are coupled.

A value that belongs to one row is bent by itself alone: the losses of the parts still combine into the loss of all rows. A
number of all rows has another value in a part, and is bent by another amount there: the losses do not combine any more.

The mode bends values that depend on parameters in every function with a corner. Of values that depend on floating-point tensors
of the batch alone, it bends only numbers of all rows, and only in a further attempt: LabelCounter handles a division by
``y.abs().mean()`` exactly. It does not bend values that depend on integers of the batch (ids, labels, masks):
``mask.sum().clamp(min=1)`` is known exactly. ``Paths`` watches the comparisons that Python reads, in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.private import has_gradient, pytree, without_modes
from meshwright.runtime.coupling.custom_backward import BackwardResults, try_custom_backward
from meshwright.runtime.coupling.float64 import in_float64
from meshwright.runtime.coupling.paths import AS_MANY_AS_FIT, COMPARES, picks
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter, tensor_arguments
from meshwright.runtime.rows.batch import tensors_in
from meshwright.spmd.autograd_functions import (
    FunctionMode,
    own_functions_noted,
    transformed_functions,
    transforming,
)
from meshwright.spmd.torch_functions import NUMBERS, YES_OR_NO, aliases, is_fact, writes

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_WAVES = 1e3  # radians from a value to another that is e times as large
_BEND = 0.01  # the largest relative change of a value

_OF_ONE = frozenset(
    "relu relu_ relu6 clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ abs abs_ absolute absolute_ __abs__ \
     sign sign_ sgn sgn_ leaky_relu leaky_relu_ prelu rrelu rrelu_ elu elu_ selu selu_ celu celu_ threshold threshold_ \
     hardtanh hardtanh_ hardsigmoid hardswish hardshrink softshrink".split()
)
_OF_TWO = frozenset("maximum minimum fmax fmin max min".split())  # of two tensors
_PICKS = frozenset("max min amax amin aminmax topk sort msort median nanmedian kthvalue quantile nanquantile".split())
# Of these: the position of the argument that says along which dim they pick (``msort`` has none), the dim if none is given
# (None: all dims), and whether the dim is kept. For others: 1, None, False.
_ALONG = {"topk": (2, -1, True), "sort": (1, -1, True), "msort": (9, 0, True), "kthvalue": (2, -1, False),
          "quantile": (2, None, False), "nanquantile": (2, None, False)}  # fmt: skip
_LOSSES = frozenset("l1_loss smooth_l1_loss huber_loss".split())


@dataclass
class Site:
    """A call of a function with a corner, or of a comparison.

    Attributes:
        line: the model's line.
        shape, total: the shape and the sum of its argument.
        read: whether Python read its result.
    """

    line: str
    shape: tuple[int, ...]
    total: Tensor
    read: bool = False


@contextmanager
def bending(
    model: nn.Module,
    modes: list[BendingMode],
    to_reverse: Collection[int] = (),
    of_batch: Collection[int] = (),
    *,
    written: Collection[Tensor] = (),
) -> Iterator[None]:
    """A context for a forward in float64 with perturbed weights (float64.py), in which values are bent.

    Args:
        modes: gets the mode of this forward if the forward ends without an error. (A forward that needs gradients fails, and
            runs again with gradients.)
        to_reverse: the comparisons to reverse, by their numbers in an earlier forward.
        of_batch: the corners of values of the batch alone that are bent, by their numbers in an earlier forward.
        written: the parameters that the forward may write to.
    """
    mode = BendingMode(to_reverse, of_batch)
    handle = model.register_forward_pre_hook(mode.entered, with_kwargs=True)
    # The mode does not see that results of collectives and of transforms of torch.func depend on their arguments.
    collectives = own_functions_noted(mode.collective)
    transforms = transformed_functions(mode.transformed)
    try:
        with (
            in_float64(perturbed=True, written=written),
            mode,
            collectives,
            transforms,
            try_custom_backward(model, mode.backward_results),
        ):
            yield
    finally:
        handle.remove()
    modes.append(mode)


def of_all_rows(sites: Sequence[Site], sites_of_part: Sequence[Site]) -> list[int]:
    """The indices of the sites whose argument is a number of all rows: in the forward of a part the argument has the same
    shape, but another value.

    Args:
        sites: of the forward of all rows, in order.
        sites_of_part: of the forward of a part.
    """
    pairs = enumerate(zip(sites, sites_of_part, strict=False))
    return [i for i, (site, in_part) in pairs if _is_of_all_rows(site, in_part)]


def _is_of_all_rows(site: Site, in_part: Site) -> bool:
    comparable = site.line == in_part.line and site.shape == in_part.shape
    return comparable and not torch.allclose(site.total, in_part.total, rtol=1e-12, atol=0.0)


class BendingMode(FunctionMode):
    """Bends the results of functions with corners, and values that are used without their gradient.

    Attributes:
        corners: the calls of functions with corners, on values that depend on parameters.
        corners_of_batch: the calls of functions with corners, on values of the batch alone.
        compared: the comparisons.
        backward_results: the results of the model's own hooks and Functions for invented gradients.
    """

    def __init__(self, to_reverse: Collection[int] = (), of_batch: Collection[int] = ()) -> None:
        super().__init__()
        self.corners: list[Site] = []
        self.corners_of_batch: list[Site] = []
        self.compared: list[Site] = []
        self.backward_results: list[BackwardResults] = []
        self._to_reverse, self._bent_of_batch = to_reverse, of_batch
        self._trained = TensorTable[bool]()  # tensors that depend on parameters
        self._data = TensorTable[bool]()  # ``h.data`` of values that have a gradient, and views of it
        self._fractions = TensorTable[bool]()  # tensors that depend on floating-point tensors of the batch
        self._comparisons = TensorTable[frozenset[int]]()  # tensor → the comparisons on which it depends
        # Whether a transform of torch.func runs, and uses tensors that depend on parameters.
        self._in_transform = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if is_fact(func):
            return func(*args, **kwargs)
        tensors = list(tensor_arguments(args, kwargs))
        depends_on_parameters = any(map(self._follows, tensors))
        if transforming():
            self._in_transform = self._in_transform or depends_on_parameters
            if self._in_transform:  # its inner tensors are new objects: any of them may depend on parameters
                args, kwargs = self._without_stops(func, args, kwargs, written=writes(func, args, kwargs))
            return func(*args, **kwargs)
        comparisons = self._read_comparisons(func, name, args, tensors)
        if depends_on_parameters:
            return self._call_on_values(func, name, args, kwargs, comparisons)
        return self._call_on_batch(func, name, args, kwargs, tensors, comparisons)

    def _call_on_values(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], comparisons: frozenset[int]
    ) -> Any:
        """Calls a function of tensors some of which depend on parameters, and on ``comparisons``."""
        written = writes(func, args, kwargs)
        if written and not args and "input" in kwargs:  # torch.relu_(input=h): below, the target is the first argument
            args = (kwargs["input"],)
            kwargs = {key: value for key, value in kwargs.items() if key != "input"}
        args, kwargs = self._without_stops(func, args, kwargs, written=written)
        first = args[0] if args else kwargs.get("input")
        with self._overwritten(first) if written else nullcontext():
            result = self._call_bent(func, name, args, kwargs)
        if isinstance(first, Tensor) and self._returns_data(func, first):
            self._data.note(pytree.tree_leaves(result), True)
        results = [*pytree.tree_leaves(result), *(args[:1] if written else ())]
        self._trained.note(results, True)
        if name in COMPARES and isinstance(result, Tensor):
            result = self._reversed(result, args, comparisons)
            self._trained.note([result], True)
        elif comparisons:
            self._comparisons.note(results, comparisons)
        return result

    def _returns_data(self, func: Any, first: Tensor) -> bool:
        """Whether a function returns ``h.data`` of a value that has a gradient, or a view of it. ``first``: its argument."""
        return (func == _DATA and has_gradient(first)) or (aliases(func) and first in self._data)

    def _read_comparisons(self, func: Any, name: str, args: Any, tensors: Sequence[Tensor]) -> frozenset[int]:
        """The comparisons on which a call's tensors depend. If Python reads the result, they are marked as read."""
        comparisons: frozenset[int] = frozenset().union(*filter(None, map(self._comparisons.of, tensors)))
        if comparisons and (name in YES_OR_NO or name in NUMBERS or name in AS_MANY_AS_FIT or picks(name, args)):
            for i in comparisons:
                self.compared[i].read = True
        return comparisons

    def _follows(self, t: Tensor) -> bool:
        """Whether a tensor depends on parameters. Every tensor that a stage receives does."""
        return t in self._trained or is_parameter(t) or t.requires_grad or getattr(t, "_mw_received", False)

    def collective(self, result: Any, args: tuple[Any, ...]) -> None:
        """Called after each collective: the result depends on everything on which the operand depends."""
        operand = args[0] if args else None
        if not isinstance(operand, Tensor):
            return
        results = pytree.tree_leaves(result)
        if operand in self._trained:
            self._trained.note(results, True)
        if operand in self._fractions:
            self._fractions.note(results, True)
        if comparisons := self._comparisons.of(operand):
            self._comparisons.note(results, comparisons)

    def transformed(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a transform of ``torch.func``. The result depends on parameters if an argument does, or a tensor that the
        transformed function uses."""
        if transforming():  # (the outer transform decides)
            return call(*args, **kwargs)
        self._in_transform = any(self._follows(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        result = call(*args, **kwargs)
        if self._in_transform:
            self._trained.note(pytree.tree_leaves(result), True)
        return result

    # --- the batch ----------------------------------------------------------------------------------------------------

    def entered(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: the model is called with a batch."""
        with without_modes():
            self._fractions.note(filter(_has_fractions, tensors_in((args, kwargs))), True)

    def _call_on_batch(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        comparisons: frozenset[int],
    ) -> Any:
        """Calls a function of tensors that do not depend on parameters. ``comparisons``: those on which they depend."""
        if not any(t in self._fractions for t in tensors):
            result = func(*args, **kwargs)
            if comparisons:
                self._comparisons.note(pytree.tree_leaves(result), comparisons)
            return result
        argument = self._decides(name, args, kwargs)
        result = func(*args, **kwargs)
        if name in COMPARES and isinstance(result, Tensor):
            return self._reversed(result, args, comparisons)
        if argument is not None:
            self.corners_of_batch.append(_site(argument))
            if len(self.corners_of_batch) - 1 in self._bent_of_batch:
                result = self._bent_at(argument, name, result, args, kwargs)
        results = [*pytree.tree_leaves(result), *(args[:1] if writes(func, args, kwargs) else ())]
        self._fractions.note(filter(_is_bendable, results), True)
        if comparisons:
            self._comparisons.note(results, comparisons)
        return result

    # --- stops --------------------------------------------------------------------------------------------------------

    def _without_stops(self, func: Any, args: Any, kwargs: Any, *, written: bool) -> Any:
        """The arguments of a function. Arguments that depend on parameters but have no gradient are bent.

        Unchanged: an argument to which the function writes; all arguments if gradients are off; all arguments of a function
        that returns a view. A view is bent where it is used: a write to the view must reach the tensor whose memory it shares
        (``k.new_empty(shape)[..., :8].copy_(k)``).
        """
        if not torch.is_grad_enabled() or aliases(func):
            return args, kwargs
        target = args[:1] if written else ()
        others, named = pytree.tree_map(self._without_stop, (args[len(target) :], kwargs))
        return (*target, *others), named

    def _without_stop(self, x: Any) -> Any:
        if not _is_bendable(x) or has_gradient(x) or is_parameter(x) or not (transforming() or self._follows(x)):
            return x
        bent_value = _bend_stop(x)
        self._trained.note([bent_value], True)
        return bent_value

    @contextmanager
    def _overwritten(self, target: Any) -> Iterator[None]:
        """A context for a write. If autograd does not see the write (the target keeps its gradient), the new value is bent by
        the old one."""
        hidden = isinstance(target, Tensor) and (
            target in self._data or (has_gradient(target) and not torch.is_grad_enabled())
        )
        if not hidden or is_parameter(target) or not _is_bendable(target):
            yield
            return
        before = target.detach().clone()
        yield
        with torch.no_grad():
            target.copy_(_bend(target.detach().clone(), before))

    # --- comparisons --------------------------------------------------------------------------------------------------

    def _reversed(self, result: Tensor, args: tuple[Any, ...], comparisons: frozenset[int]) -> Tensor:
        """Notes a comparison. Returns its result, or the reverse.

        Args:
            comparisons: the earlier comparisons on which its arguments depend.
        """
        number = len(self.compared)
        a, b = args[:2]
        self.compared.append(_site(a - b if _is_bendable(a) else a))
        if number in self._to_reverse:
            result = ~result
        self._comparisons.note([result], comparisons | {number})
        return result

    # --- corners ------------------------------------------------------------------------------------------------------

    def _call_bent(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function; its result is bent if the function has a corner."""
        if name in NUMBERS:
            number = func(*args, **kwargs)
            return float(_bend_stop(torch.tensor(number).double())) if isinstance(number, float) else number
        argument = self._decides(name, args, kwargs)
        result = func(*args, **kwargs)
        if argument is None and name in _PICKS:
            return pytree.tree_map(lambda t: _bend(t, _picked_from(name, args, kwargs, t)), result)
        if argument is None:
            return result
        self.corners.append(_site(argument))
        return self._bent_at(argument, name, result, args, kwargs)

    def _bent_at(self, at: Tensor, name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function with a corner, bent by its argument ``at``."""
        if name in _LOSSES:
            return result + _BEND * _reduced(_bump(at), result, args, kwargs)
        if args and result is args[0]:  # written in place
            with torch.no_grad():
                return result.copy_(_bend(result.detach().clone(), at))
        return _bend(result, at)

    def _decides(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A copy of the value that decides on which side of its corner a function is; None if it has no corner."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in _OF_ONE and _is_bendable(tensors[0]):
            return tensors[0].detach().clone()
        if (name in _OF_TWO or name in _LOSSES) and len(tensors) >= 2:
            return (tensors[0] - tensors[1]).detach() if all(map(_is_bendable, tensors[:2])) else None
        if name == "where" and len(tensors) == 3 and tensors[0].dim() and self._follows(tensors[0]):
            return (tensors[1] - tensors[2]).detach() if all(map(_is_bendable, tensors[1:])) else None
        return None


def _site(at: Tensor) -> Site:
    return Site(model_line(), tuple(at.shape), at.detach().double().sum())


def _is_bendable(t: Any) -> bool:
    plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_nested
    return plain and t.is_floating_point() and not t.is_meta


def _has_fractions(t: Tensor) -> bool:
    return _is_bendable(t) and not torch.equal(t, t.round())


def _bump(at: Tensor) -> Tensor:
    """An elementwise function between 0 and 1 that is linear nowhere, neither for small nor for large values. (Infinite values
    count as large ones.)

    The waves are short: two means that differ by 1e-4 of their size (of normalized activations, say; or far from a corner) get
    different results. If the function were nearly linear between them, that of the mean of all rows would be the mean of those
    of the parts.
    """
    return 0.5 * (1 + torch.sin(_WAVES * at.abs().log1p().clamp(max=1e3)))


def _picked_from(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """A number for each element of a result that a function picked. It follows from all values that could have been picked:
    in a later step it may be another of them."""
    x: Any = args[0] if args else kwargs.get("input")
    if not (_is_bendable(x) and _is_bendable(result) and x.dim()):
        return result
    number, dims, keeps = _ALONG.get(name, (1, None, False))
    dims = kwargs.get("dim", args[number] if len(args) > number else dims)
    if isinstance(dims, bool) or dims == ():
        dims = None
    keeps = keeps or bool(kwargs.get("keepdim", args[number + 1] if len(args) > number + 1 else False))
    each = _bump(x.detach())
    of_all = each.mean() if dims is None else each.mean(dims, keepdim=keeps)
    return of_all.expand_as(result) if _fits(of_all, result) else result


def _fits(t: Tensor, like: Tensor) -> bool:
    pairs = zip(t.shape[::-1], like.shape[::-1], strict=False)
    return t.dim() <= like.dim() and all(a in (1, b) for a, b in pairs)


def _bend(t: Any, at: Any) -> Any:
    """``t``, changed a little, by an amount that follows from ``at``. Signs stay and no value grows, so that the next function
    is still defined for ``t``. Integers are unchanged."""
    if not _is_bendable(t):
        return t
    bump = _BEND * _bump(at)
    return torch.where(t == 0, bump.to(t.dtype), t * (1 - bump).to(t.dtype))


def _bend_stop(t: Tensor) -> Tensor:
    """``_bend`` for a value by itself. Infinite values are unchanged."""
    return torch.where(t == 0, _BEND, t * (1 - _BEND * _bump(t))).to(t.dtype)


def _reduced(each: Tensor, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The reduction of a loss over its elements, as its arguments say: a sum or a mean; no reduction if shapes are equal."""
    if like.shape == each.shape:
        return each
    summed = "sum" in (*args, kwargs.get("reduction")) or args[2:3] == (2,)
    return each.sum() if summed else each.mean()
