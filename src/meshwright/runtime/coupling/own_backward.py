"""``own_backward``: tries how a model's own hooks and Functions change gradients, within a forward.

A trial runs no backward. But a hook that divides a gradient by its norm, or a ``Function`` whose backward does so, depends on
all rows: one device has the gradients of all of them. So in one forward each gets an invented gradient. It is computed from the
value, element by element, so that a part of the rows gets its part of the gradient. Then

    the result has rows         sums over its elements, of any function of them, must add up over the parts
    the result has no rows      the gradient of a parameter must be the sum over the parts
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
from meshwright.calls.placeholder import Placeholder
from meshwright.private import backward_hooks, has_backward_hooks, pytree, without_modes
from meshwright.spmd.autograd_functions import FunctionMode, custom_functions, no_backward_within, transforming

# The relative tolerance for sums of gradients, by dtype.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF = 5e-2

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Changed:
    """The results of one hook or Function of the model for two gradients, and for their sum.

    Attributes:
        line: the model's line.
        shapes: the shapes of the gradients that it got.
        of_first, of_second, of_sum: its results.
    """

    line: str
    shapes: tuple[torch.Size, ...]
    of_first: Gradients
    of_second: Gradients
    of_sum: Gradients


@contextmanager
def own_backward(model: nn.Module, results: list[Changed]) -> Iterator[None]:
    """While on, each hook and Function of the model is tried when the forward comes to it. ``results``: gets the results."""
    try_backward = partial(_try_backward, results)
    with ExitStack() as stack:
        for module in filter(has_backward_hooks, model.modules()):
            handle = module.register_forward_hook(partial(_try_module, try_backward))
            stack.callback(handle.remove)
        stack.enter_context(custom_functions(partial(_try_function, try_backward)))
        stack.enter_context(_Functions(try_backward))
        yield


def line_across_rows(changes: Sequence[Changed], changes_of_parts: Sequence[Sequence[Changed]]) -> str | None:
    """The first line at which the result for the gradient of all rows does not follow from those of the parts; None if there
    is none. ``changes``: in the forward of all rows, in order."""
    for of_all, *of_parts in zip(changes, *changes_of_parts, strict=False):
        comparable = all(p.line == of_all.line and len(p.of_first) == len(of_all.of_first) for p in of_parts)
        if comparable and not _fits(of_all, of_parts):
            return of_all.line
    return None


def _fits(of_all: Changed, parts: Sequence[Changed]) -> bool:
    """Whether what a hook or Function makes of the gradient of all rows follows from what it makes of those of the parts."""
    if any(shape in others for shape, *others in zip(of_all.shapes, *(p.shapes for p in parts), strict=False)):
        return _are_sums(of_all.of_sum, (of_all.of_first, of_all.of_second))
    return _are_sums(of_all.of_first, [p.of_first for p in parts])


def _are_sums(gradients: Gradients, gradients_of_parts: Sequence[Gradients]) -> bool:
    """Whether gradients are the sums of their parts; or, if shapes differ, whether sums over their elements are."""
    for gradient, *pieces in zip(gradients, *gradients_of_parts, strict=True):
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
    """The sums over the elements of three functions."""
    return torch.stack([t.sum(), t.square().sum(), t.abs().sum()])


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding. True if they are not finite, which says nothing."""
    tolerance = _TOLERANCE.get(a.dtype, _HALF)
    return not bool((a + b).isfinite().all()) or torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# --- hooks and Functions of the model ---------------------------------------------------------------------------------

Try = Callable[[Sequence[Tensor], Callable[[list[Tensor]], Gradients]], None]
"""(values, a function from gradients of these values to results): tries the function."""


class _Functions(FunctionMode):
    """Sees hooks on tensors, and torch functions whose backward uses a number that depends on all rows."""

    def __init__(self, try_backward: Try) -> None:
        super().__init__()
        self._try_backward = try_backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.register_hook and not transforming():
            self._try_hook(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _COUNTING and (kwargs.get("scale_grad_by_freq") or any(args[3:4])) and not transforming():
            # A mean stands for this function: it depends on all rows likewise.
            self._try_backward(_tensors(result), lambda gradients: [g.mean() for g in gradients])
        return result

    def _try_hook(self, t: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        if _is_floating(t):
            self._try_backward([t], lambda gradients: [hook(*gradients)])


# With ``scale_grad_by_freq``, the fourth argument, their backward divides by the frequency of an index in all rows. (The real
# backward shows nothing if no index happens to occur in both parts.)
_COUNTING = (torch.embedding, torch.embedding_bag)


def _try_function(try_backward: Try, apply: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    result = apply(function, *args, **kwargs)
    values = _tensors(result)
    if values and not function.__module__.startswith("torch.") and not transforming():
        try_backward(values, partial(_backward_of, partial(apply, function), args, kwargs))
    return result


def _backward_of(call: Callable[..., Any], args: Any, kwargs: Any, gradients: list[Tensor]) -> Gradients:
    """The gradients of a function's arguments for gradients of its results, by a separate forward and backward."""
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        leaves = pytree.tree_map(_leaf, (args, kwargs))
        cloned_args, cloned_kwargs = pytree.tree_map_only(Tensor, torch.clone, leaves)  # the function may write to them
        pairs = zip(_tensors(call(*cloned_args, **cloned_kwargs)), gradients, strict=True)
        outputs, output_gradients = zip(*((t, g) for t, g in pairs if t.requires_grad), strict=True)
        inputs = [x for x in pytree.tree_leaves(leaves) if isinstance(x, Tensor) and x.requires_grad]
        with no_backward_within():
            return list(torch.autograd.grad(outputs, inputs, output_gradients, allow_unused=True))


def _try_module(try_backward: Try, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    """A forward hook that tries the backward hooks of a module."""
    before, after = backward_hooks(module)
    inputs = [x if _is_floating(x) else None for x in args]
    outputs = [t if _is_floating(t) else None for t in (result if isinstance(result, tuple) else (result,))]

    def with_gradients(tensors: Sequence[Any], gradients: Iterator[Tensor]) -> tuple[Any, ...]:
        return tuple(None if x is None else next(gradients) for x in tensors)

    def backward(gradients: list[Tensor]) -> Gradients:
        remaining = iter(gradients)
        of_inputs, of_outputs = with_gradients(inputs, remaining), with_gradients(outputs, remaining)
        for hook in before:
            of_outputs = _replaced_by(hook(module, of_outputs), of_outputs)
        for hook in after:
            of_inputs = _replaced_by(hook(module, of_inputs, of_outputs), of_inputs)
        return [*of_inputs, *of_outputs]

    try_backward([x for x in (*inputs, *outputs) if x is not None], backward)


def _replaced_by(changed: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients that a module's hook returned; ``before`` if it returned None."""
    if changed is None:
        return before
    return tuple(changed) if isinstance(changed, (tuple, list)) else (changed,)


# --- trying -----------------------------------------------------------------------------------------------------------


def _try_backward(
    results: list[Changed], values: Sequence[Tensor], backward: Callable[[list[Tensor]], Gradients]
) -> None:
    """Adds the results of a backward for invented gradients of these values; nothing if it fails outside of a real backward."""
    if any(isinstance(t, Placeholder) or t.is_meta for t in values):
        return  # other ranks have the values, or the parameters from which they are computed
    with without_modes(), torch.no_grad():  # a stage traces the model's functions, and these are not the model's
        first, second = ([torch.sin(rate * t.detach() + rate) for t in values] for rate in (1.0, 1.7))
        both = [x + y for x, y in zip(first, second, strict=True)]
        try:
            changed = [_detached(backward([t.clone() for t in gradients])) for gradients in (first, second, both)]
        except Exception:  # a hook may rely on the backward around it
            return
    results.append(Changed(model_line(), tuple(t.shape for t in values), *changed))


def _detached(gradients: Gradients) -> Gradients:
    return [None if t is None else t.detach() for t in gradients]


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if _is_floating(t)]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _leaf(x: Any) -> Any:
    """A copy of a tensor as a leaf, which requires a gradient if it can; other values as they are."""
    if not isinstance(x, Tensor):
        return x
    leaf = x.detach().clone()
    return leaf.requires_grad_() if _is_floating(x) else leaf


def _same(t: Tensor) -> Tensor:
    return t
