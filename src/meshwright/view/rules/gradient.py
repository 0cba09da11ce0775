"""Gradients that a model asks for in its own forward, and the hooks it puts on values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Cut, Partial
from meshwright.view import moves
from meshwright.view.rules.registry import RULES, named, rule
from meshwright.view.tensor import View


def _of_value(work: Any, gradient: Tensor | None, x: Any) -> Any:
    """The gradient of a View's local tensor, as the model sees it: cut like it, or whole (a summand's is whole)."""
    layout = work.layout(x)
    if gradient is None or not isinstance(layout, (Cut, Partial)):
        return gradient
    return work.view(gradient, layout) if isinstance(layout, Cut) else moves.release(gradient, work.axis)


def grad(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``: of whole outputs, by the local tensors that inputs stand for."""
    names = named("outputs inputs grad_outputs retain_graph create_graph", args, kwargs)
    if names.get("is_grads_batched"):
        return NotImplemented
    inputs = names["inputs"] if isinstance(names["inputs"], (tuple, list)) else (names["inputs"],)
    for key in ("outputs", "grad_outputs"):
        value = names.get(key)
        names[key] = [*map(work.whole, value)] if isinstance(value, (tuple, list)) else work.whole(value)
    names["inputs"] = [x._mw_local if isinstance(x, View) else x for x in inputs]
    found = func(**names)
    return tuple(_of_value(work, g, x) for g, x in zip(found, inputs, strict=True))


def backward(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``backward``, of whole outputs; gradients gather at the leaves under the local tensors."""
    names = named("tensors grad_tensors retain_graph create_graph grad_variables inputs", args, kwargs)
    for key in ("tensors", "grad_tensors"):
        value = names.get(key)
        names[key] = [*map(work.whole, value)] if isinstance(value, (tuple, list)) else work.whole(value)
    if (inputs := names.get("inputs")) is not None:
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        names["inputs"] = [x._mw_local if isinstance(x, View) else x for x in inputs]
    return func(**names)


RULES[torch.autograd.grad] = grad
RULES[torch.autograd.backward] = backward


@rule("register_hook")
def register_hook(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook sees the whole gradient, on every rank."""
    x, hook = (*args, *kwargs.values())
    layout = x._mw_layout
    if not isinstance(layout, Cut):
        return x._mw_local.register_hook(hook)

    def of_slice(gradient: Tensor) -> Tensor | None:
        changed = hook(moves.gather(gradient, work.axis, layout))
        return None if changed is None else work.cut(changed, layout)

    return x._mw_local.register_hook(of_slice)


@rule("retain_grad")
def retain_grad(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0]._mw_local.retain_grad()


def grad_of(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _of_value(work, args[0]._mw_local.grad, args[0])


RULES[getattr(Tensor, "grad").__get__] = grad_of  # noqa: B009  (a property of the class, not of a tensor)
