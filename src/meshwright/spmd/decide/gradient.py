"""Gradients that a model asks for in its own forward, and the hooks it puts on values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Partial, Shard
from meshwright.spmd import redistribute
from meshwright.spmd.decide.registry import ANSWERS, answer, named
from meshwright.spmd.tensor import local_of


def _of_value(work: Any, gradient: Tensor | None, x: Any) -> Any:
    """The gradient of a global tensor's local tensor, as the model sees it: cut like it, or whole (a summand's is whole)."""
    layout = work.layout(x)
    if gradient is None or not isinstance(layout, (Shard, Partial)):
        return gradient
    if not isinstance(layout, Shard):
        return redistribute.keep_first_backward(gradient, work.axis)
    global_gradient = work.view(gradient, layout)
    work.lay(global_gradient, None)
    return global_gradient


def _made_whole(work: Any, names: dict[str, Any], *keys: str) -> None:
    """The tensors that a backward starts from. Their moves are part of the graph, also where a backward starts another."""
    with torch.enable_grad():
        for key in keys:
            value = names.get(key)
            names[key] = [*map(work.whole, value)] if isinstance(value, (tuple, list)) else work.whole(value)


def grad(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``: of whole outputs, by the local tensors that inputs stand for."""
    names = named(
        "outputs inputs grad_outputs retain_graph create_graph only_inputs allow_unused is_grads_batched materialize_grads",
        args, kwargs,
    )  # fmt: skip
    inputs = names["inputs"] if isinstance(names["inputs"], (tuple, list)) else (names["inputs"],)
    _made_whole(work, names, "outputs", "grad_outputs")
    names["inputs"] = [local_of(x) for x in inputs]
    gradients = work.engine(func)(**names)
    return tuple(_of_value(work, g, x) for g, x in zip(gradients, inputs, strict=True))


def backward(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``backward``, of whole outputs; gradients gather at the leaves under the local tensors."""
    names = named("tensors grad_tensors retain_graph create_graph grad_variables inputs", args, kwargs)
    _made_whole(work, names, "tensors", "grad_tensors")
    if (inputs := names.get("inputs")) is not None:
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        names["inputs"] = [local_of(x) for x in inputs]
    return work.engine(func)(**names)


ENGINES = {torch.autograd.grad: grad, torch.autograd.backward: backward}
ANSWERS.update(ENGINES)


@answer("register_hook")
def register_hook(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook sees the gradient as the model sees the tensor: whole; what it gives back is cut as the tensor is."""
    x, hook = (*args, *kwargs.values())
    layout = x._mw_layout
    if not isinstance(layout, Shard):  # the gradient of a summand is whole
        return x._mw_local.register_hook(hook)

    def of_local(gradient: Tensor) -> Any:
        changed = hook(work.view(gradient, layout))
        return None if changed is None else work.cut(changed, layout)

    return x._mw_local.register_hook(of_local)


@answer("retain_grad")
def retain_grad(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0]._mw_local.retain_grad()


def grad_of(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _of_value(work, args[0]._mw_local.grad, args[0])


ANSWERS[getattr(Tensor, "grad").__get__] = grad_of  # noqa: B009  (a property of the class, not of a tensor)
