"""``try_custom_backward``: tries, within a forward, how a model's own hooks and Functions change gradients.

A trial runs no backward. But the result of a hook that divides a gradient by its norm depends on all rows: on one device the
hook gets the gradients of all rows. A ``Function`` whose backward does so is alike. So in one forward each hook and Function
gets an invented gradient. Each element of this gradient is computed from the same element of the value, so that a part of the
rows gets its part of the gradient. Then the results of the parts are compared with the result for all rows:

    the result has rows         for any function, the sums of it over the elements must add up over the parts
    the result has no rows      it is the gradient of a parameter, and must be the sum over the parts
    the argument has no rows    its gradient is the sum over the parts: the result for a sum must be the sum of the results
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
from meshwright.calls.placeholder import Placeholder, place_of
from meshwright.private import backward_hooks, has_backward_hooks, pytree, without_modes
from meshwright.spmd.autograd_functions import FunctionMode, custom_functions, no_backward_within, transforming

# The relative tolerance for sums of gradients, by dtype.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF = 5e-2

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class BackwardResults:
    """The results of one hook or Function of the model for two gradients, and for their sum.

    Attributes:
        line: the model's line.
        shapes: the shapes of the gradients that the hook or Function got.
        of_first, of_second, of_sum: its results for the first gradient, the second gradient, and their sum.
    """

    line: str
    shapes: tuple[torch.Size, ...]
    of_first: Gradients
    of_second: Gradients
    of_sum: Gradients


@contextmanager
def try_custom_backward(model: nn.Module, results: list[BackwardResults]) -> Iterator[None]:
    """A context for a forward. Tries each hook and Function of the model when the forward comes to it.

    Args:
        results: gets the results, in the order of the forward.
    """
    try_backward = partial(_try_backward, results)
    with ExitStack() as stack:
        for module in filter(has_backward_hooks, model.modules()):
            handle = module.register_forward_hook(partial(_try_module, try_backward))
            stack.callback(handle.remove)
        stack.enter_context(custom_functions(partial(_try_function, try_backward)))
        stack.enter_context(_Functions(try_backward))
        yield


def line_across_rows(
    results: Sequence[BackwardResults], results_of_parts: Sequence[Sequence[BackwardResults]]
) -> str | None:
    """The first line at which the result for the gradient of all rows does not follow from the results for the gradients of the
    parts; None if there is no such line.

    Args:
        results: of the forward of all rows, in order.
        results_of_parts: of the forward of each part.
    """
    for of_all, *of_parts in zip(results, *results_of_parts, strict=False):
        comparable = all(p.line == of_all.line and len(p.of_first) == len(of_all.of_first) for p in of_parts)
        if comparable and not _fits(of_all, of_parts):
            return of_all.line
    return None


def _fits(of_all: BackwardResults, parts: Sequence[BackwardResults]) -> bool:
    """Whether the result of a hook or Function for the gradient of all rows follows from its results for the parts."""
    shapes = zip(of_all.shapes, *(part.shapes for part in parts), strict=False)
    if any(shape in shapes_in_parts for shape, *shapes_in_parts in shapes):  # an argument without rows
        return _are_sums(of_all.of_sum, (of_all.of_first, of_all.of_second))
    return _are_sums(of_all.of_first, [p.of_first for p in parts])


def _are_sums(gradients: Gradients, gradients_of_parts: Sequence[Gradients]) -> bool:
    """Whether each gradient is the sum of the gradients of the parts. If shapes differ (each part has its rows), whether sums
    over the elements add up."""
    for gradient, *of_parts in zip(gradients, *gradients_of_parts, strict=True):
        terms = [t for t in of_parts if t is not None]
        if gradient is None or len(terms) < len(of_parts):
            continue
        if any(t.shape != gradient.shape for t in terms):
            gradient, terms = _sums(gradient), [_sums(t) for t in terms]
        if not _near(gradient, sum(terms[1:], terms[0])):
            return False
    return True


def _sums(t: Tensor) -> Tensor:
    """The sums of three functions of the elements: the element, its square, its absolute value."""
    return torch.stack([t.sum(), t.square().sum(), t.abs().sum()])


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding. True if one is not finite: then nothing can be concluded."""
    tolerance = _TOLERANCE.get(a.dtype, _HALF)
    return not bool((a + b).isfinite().all()) or torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# --- hooks and Functions of the model ---------------------------------------------------------------------------------

Try = Callable[[Sequence[Tensor], Callable[[list[Tensor]], Gradients]], None]
"""(values, a function from gradients of these values to results): tries the function."""


class _Functions(FunctionMode):
    """Tries hooks on tensors, and torch functions whose backward uses a number that depends on all rows."""

    def __init__(self, try_backward: Try) -> None:
        super().__init__()
        self._try_backward = try_backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            self._try_hook(*args, **kwargs)
        result = func(*args, **kwargs)
        scales_by_frequency = func in _EMBEDDINGS and (kwargs.get("scale_grad_by_freq") or any(args[3:4]))
        if scales_by_frequency:
            # A mean is tried in place of this backward: it depends on all rows, too.
            self._try_backward(_tensors(result), lambda gradients: [g.mean() for g in gradients])
        return result

    def _try_hook(self, t: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        if _is_floating(t):
            self._try_backward([t], lambda gradients: [hook(*gradients)])


# With ``scale_grad_by_freq``, the fourth argument, their backward divides by the frequency of an index in all rows. (A trial of
# this backward itself would show nothing if no index happened to occur in both parts.)
_EMBEDDINGS = (torch.embedding, torch.embedding_bag)


def _try_function(try_backward: Try, apply: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    result = apply(function, *args, **kwargs)
    values = _tensors(result)
    if values and not function.__module__.startswith("torch."):
        try_backward(values, partial(_backward_of, partial(apply, function), args, kwargs))
    return result


def _backward_of(call: Callable[..., Any], args: Any, kwargs: Any, gradients: list[Tensor]) -> Gradients:
    """Runs a function's forward and backward separately. Returns the gradients of its arguments for these gradients of its
    results."""
    with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
        leaves = pytree.tree_map(_leaf, (args, kwargs))
        cloned_args, cloned_kwargs = pytree.tree_map_only(Tensor, torch.clone, leaves)  # the function may write to them
        results = _tensors(call(*cloned_args, **cloned_kwargs))
        pairs = [(t, g) for t, g in zip(results, gradients, strict=True) if t.requires_grad]
        outputs, output_gradients = zip(*pairs, strict=True)
        inputs = [x for x in pytree.tree_leaves(leaves) if isinstance(x, Tensor) and x.requires_grad]
        with no_backward_within():
            return list(torch.autograd.grad(outputs, inputs, output_gradients, allow_unused=True))


def _try_module(try_backward: Try, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    """A forward hook that tries the backward hooks of a module."""
    before, after = backward_hooks(module)
    results = result if isinstance(result, tuple) else (result,)
    inputs = [x if _is_floating(x) else None for x in args]
    outputs = [t if _is_floating(t) else None for t in results]

    def with_gradients(tensors: Sequence[Any], gradients: Iterator[Tensor]) -> tuple[Any, ...]:
        return tuple(None if x is None else next(gradients) for x in tensors)

    def backward(gradients: list[Tensor]) -> Gradients:
        remaining = iter(gradients)
        of_inputs = with_gradients(inputs, remaining)
        of_outputs = with_gradients(outputs, remaining)
        for hook in before:
            of_outputs = _replaced_by(hook(module, of_outputs), of_outputs)
        for hook in after:
            of_inputs = _replaced_by(hook(module, of_inputs, of_outputs), of_inputs)
        return [*of_inputs, *of_outputs]

    try_backward([x for x in (*inputs, *outputs) if x is not None], backward)


def _replaced_by(returned: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients that a module's hook returned; ``before`` if it returned None."""
    if returned is None:
        return before
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


# --- trying -----------------------------------------------------------------------------------------------------------


def _try_backward(
    results: list[BackwardResults], values: Sequence[Tensor], backward: Callable[[list[Tensor]], Gradients]
) -> None:
    """Adds the results of a backward for invented gradients of these values. Adds nothing if the backward fails."""
    if transforming():
        return  # the values, and what follows from them, end with the transform
    if len({place_of(t) for t in values} - {None}) > 1:
        # Some ranks lack values of a branch, so they cannot all try it. It counts as one that acts on all rows together.
        one: Gradients = [torch.ones(())]
        results.append(BackwardResults(model_line(), (), one, one, one))
        return
    if any(isinstance(t, Placeholder) or t.is_meta for t in values):
        return  # other ranks have the values, or the parameters from which they are computed
    with without_modes(), torch.no_grad():  # a stage traces the model's functions, and these are not the model's
        first = _invented(values, 1.0)
        second = _invented(values, 1.7)
        both = [x + y for x, y in zip(first, second, strict=True)]
        try:
            changed = [_detached(backward([t.clone() for t in gradients])) for gradients in (first, second, both)]
        except Exception:  # a hook may need the rest of the model's backward
            return
    results.append(BackwardResults(model_line(), tuple(t.shape for t in values), *changed))


def _invented(values: Sequence[Tensor], rate: float) -> list[Tensor]:
    """A gradient for each value, each of whose elements follows from the same element of the value."""
    return [torch.sin(rate * t.detach() + rate) for t in values]


def _detached(gradients: Gradients) -> Gradients:
    return [None if t is None else t.detach() for t in gradients]


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if _is_floating(t)]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _leaf(x: Any) -> Any:
    """A copy of a tensor as a leaf of autograd, which requires a gradient if its dtype allows it. Other values are returned
    unchanged."""
    if not isinstance(x, Tensor):
        return x
    leaf = x.detach().clone()
    return leaf.requires_grad_() if _is_floating(x) else leaf


def _unchanged(t: Tensor) -> Tensor:
    return t
