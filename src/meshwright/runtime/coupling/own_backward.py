"""``own_backward``: what a model's own hooks and Functions make of gradients, tried in a forward.

A trial runs no backward. But a hook that divides a gradient by its norm, or a ``Function`` whose backward does, computes with
what is there: one device has the gradients of all rows. So in one forward each is given a gradient that is made up. It
follows from the value that it is the gradient of, element by element, so a part of the rows gets its part of it:

    what has rows         what comes back, in any function of its elements, adds up over the parts
    what has none         a parameter's gradient is the sum of those of the parts
    given to what has     the gradient itself is the sum of those of the parts: what comes of a sum must be the sum of what
    no rows               comes of its terms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.blame import model_line
from meshwright.calls.placeholder import Placeholder
from meshwright.private import backward_hooks, has_backward_hooks, pytree, without_modes
from meshwright.spmd.autograd_functions import FunctionMode, custom_functions, no_backward_within, transforming

# By how much sums of gradients may differ, of them, by the type that they were computed in.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF = 5e-2

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Changed:
    """What one of the model's own made of gradients, of two, and of their sum.

    Attributes:
        line: of the model.
        given: the shapes of the gradients that it was given.
        made: what became of the first.
        of_second, of_sum: the same, of others.
    """

    line: str
    given: tuple[torch.Size, ...]
    made: Gradients
    of_second: Gradients
    of_sum: Gradients


@contextmanager
def own_backward(model: nn.Module, met: list[Changed]) -> Iterator[None]:
    """For the time of a forward, hooks and Functions of the model's own are tried as it comes to them; ``met`` is told."""
    told = partial(_tell, met)
    with ExitStack() as stack:
        for module in filter(has_backward_hooks, model.modules()):
            handle = module.register_forward_hook(partial(_try_module, told))
            stack.callback(handle.remove)
        stack.enter_context(custom_functions(partial(_try_function, told)))
        stack.enter_context(_Functions(told))
        yield


def line_across_rows(whole: Sequence[Changed], parts: Sequence[Sequence[Changed]]) -> str | None:
    """The first line at which what becomes of a gradient of all rows is not what the parts make; None if there is none."""
    for of_all, *of_parts in zip(whole, *parts, strict=False):
        if all(p.line == of_all.line and len(p.made) == len(of_all.made) for p in of_parts) and not _fits(
            of_all, of_parts
        ):
            return of_all.line
    return None


def _fits(whole: Changed, parts: Sequence[Changed]) -> bool:
    if any(shape in others for shape, *others in zip(whole.given, *(p.given for p in parts), strict=False)):
        return _makes(whole.of_sum, (whole.made, whole.of_second))
    return _makes(whole.made, [p.made for p in parts])


def _makes(whole: Gradients, parts: Sequence[Gradients]) -> bool:
    """Whether the parts of gradients add up, or lie side by side."""
    for gradient, *pieces in zip(whole, *parts, strict=True):
        terms = [p for p in pieces if p is not None]
        if gradient is None or len(terms) < len(pieces):
            continue
        if all(t.shape == gradient.shape for t in terms):
            fits = _near(gradient, sum(terms[1:], terms[0]))
        else:
            fits = _near(_sums(gradient), sum(map(_sums, terms[1:]), _sums(terms[0])))
        if not fits:
            return False
    return True


def _sums(t: Tensor) -> Tensor:
    """Sums over functions of the elements."""
    return torch.stack([t.sum(), t.square().sum(), t.abs().sum()])


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether they are the same but for rounding. What is not finite tells nothing."""
    tolerance = _TOLERANCE.get(a.dtype, _HALF)
    return not bool((a + b).isfinite().all()) or torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# --- what the model has of its own ------------------------------------------------------------------------------------

Told = Callable[[Sequence[Tensor], Callable[[list[Tensor]], Gradients]], None]


class _Functions(FunctionMode):
    """Sees hooks on values, and the functions of torch whose backward computes with a number of all rows."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.register_hook and not transforming():
            self._try_hook(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _COUNTING and (kwargs.get("scale_grad_by_freq") or any(args[3:4])) and not transforming():
            self._told(_tensors(result), lambda gradients: [g.mean() for g in gradients])  # so does a mean
        return result

    def _try_hook(self, t: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        if _is_floating(t):
            self._told([t], lambda gradients: [hook(*gradients)])


# Given ``scale_grad_by_freq``, the fourth argument, their backward divides by a number of all rows: how often an index stands
# in them. (Tried with a few rows, it may happen that no index stands in both parts.)
_COUNTING = (torch.embedding, torch.embedding_bag)


def _try_function(told: Told, apply: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    result = apply(function, *args, **kwargs)
    values = _tensors(result)
    if values and not function.__module__.startswith("torch.") and not transforming():
        told(values, partial(_backward_of, partial(apply, function), args, kwargs))
    return result


def _backward_of(call: Callable[..., Any], args: Any, kwargs: Any, gradients: list[Tensor]) -> Gradients:
    """What a function makes of gradients of what it gives, in a forward and backward by themselves."""
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        leaves = pytree.tree_map(_leaf, (args, kwargs))
        given, named = pytree.tree_map_only(Tensor, torch.clone, leaves)  # which the function may write to
        pairs = zip(_tensors(call(*given, **named)), gradients, strict=True)
        made, of_made = zip(*((t, g) for t, g in pairs if t.requires_grad), strict=True)
        inputs = [x for x in pytree.tree_leaves(leaves) if isinstance(x, Tensor) and x.requires_grad]
        with no_backward_within():
            return list(torch.autograd.grad(made, inputs, of_made, allow_unused=True))


def _try_module(told: Told, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    before, after = backward_hooks(module)
    inputs = [x if _is_floating(x) else None for x in args]
    outputs = [t if _is_floating(t) else None for t in (result if isinstance(result, tuple) else (result,))]

    def with_gradients(places: Sequence[Any], gradients: Iterator[Tensor]) -> tuple[Any, ...]:
        return tuple(None if x is None else next(gradients) for x in places)

    def backward(gradients: list[Tensor]) -> Gradients:
        left = iter(gradients)
        of_inputs, of_outputs = with_gradients(inputs, left), with_gradients(outputs, left)
        for hook in before:
            of_outputs = _or(hook(module, of_outputs), of_outputs)
        for hook in after:
            of_inputs = _or(hook(module, of_inputs, of_outputs), of_inputs)
        return [*of_inputs, *of_outputs]

    told([x for x in (*inputs, *outputs) if x is not None], backward)


def _or(changed: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a module's hook gives; as before if it gives nothing."""
    if changed is None:
        return before
    return tuple(changed) if isinstance(changed, (tuple, list)) else (changed,)


# --- trying -----------------------------------------------------------------------------------------------------------


def _tell(met: list[Changed], values: Sequence[Tensor], backward: Callable[[list[Tensor]], Gradients]) -> None:
    """Adds what a backward makes of gradients of these values; nothing if it cannot be tried by itself."""
    if any(isinstance(t, Placeholder) or t.is_meta for t in values):
        return  # other ranks have them, or the parameters that they are made of
    with without_modes(), torch.no_grad():  # a stage follows what the model runs, and this is not of the model
        first, second = ([torch.sin(rate * t.detach() + rate) for t in values] for rate in (1.0, 1.7))
        both = [x + y for x, y in zip(first, second, strict=True)]
        try:
            made = [_held(backward([t.clone() for t in given])) for given in (first, second, both)]
        except Exception:  # a hook may count on the backward around it
            return
    met.append(Changed(model_line(), tuple(t.shape for t in values), *made))


def _held(gradients: Gradients) -> Gradients:
    return [None if t is None else t.detach() for t in gradients]


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if _is_floating(t)]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _leaf(x: Any) -> Any:
    """A value by itself, of which a gradient is asked if one can be."""
    if not isinstance(x, Tensor):
        return x
    by_itself = x.detach().clone()
    return by_itself.requires_grad_() if _is_floating(x) else by_itself


def _same(t: Tensor) -> Tensor:
    return t
