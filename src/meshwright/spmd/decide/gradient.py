"""``torch.autograd.grad`` and ``backward`` within a model's own forward, and the hooks that a model puts on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Partial, Shard
from meshwright.spmd import redistribute
from meshwright.spmd.decide.registry import ANSWERS, answer, named
from meshwright.spmd.tensor import local_of


def _global_gradient(dispatcher: Any, gradient: Tensor | None, x: Any) -> Any:
    """The gradient of ``x`` as the model sees it, from the gradient of its local tensor.

    It is sharded like ``x``. The gradient of a partial sum is whole on every rank.
    """
    layout = dispatcher.layout(x)
    if gradient is None or not isinstance(layout, (Shard, Partial)):
        return gradient
    if not isinstance(layout, Shard):
        return redistribute.keep_first_backward(gradient, dispatcher.axis)
    global_gradient = dispatcher.global_tensor(gradient, layout)
    dispatcher.set_strides(global_gradient, None)
    return global_gradient


def _gather_arguments(dispatcher: Any, names: dict[str, Any], *keys: str) -> None:
    """Gathers the arguments ``keys``, from which a backward starts. The collectives are part of the graph, also if this
    backward runs within another."""
    with torch.enable_grad():
        for key in keys:
            value = names.get(key)
            names[key] = (
                [*map(dispatcher.full_tensor, value)]
                if isinstance(value, (tuple, list))
                else dispatcher.full_tensor(value)
            )


def grad(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` of gathered outputs with respect to the local tensors of the inputs."""
    names = named(
        "outputs inputs grad_outputs retain_graph create_graph only_inputs allow_unused is_grads_batched materialize_grads",
        args, kwargs,
    )  # fmt: skip
    inputs = names["inputs"] if isinstance(names["inputs"], (tuple, list)) else (names["inputs"],)
    _gather_arguments(dispatcher, names, "outputs", "grad_outputs")
    names["inputs"] = [local_of(x) for x in inputs]
    gradients = dispatcher.engine(func)(**names)
    return tuple(_global_gradient(dispatcher, g, x) for g, x in zip(gradients, inputs, strict=True))


def backward(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward`` of gathered outputs; gradients add up at the leaves of the local tensors' graph."""
    names = named("tensors grad_tensors retain_graph create_graph grad_variables inputs", args, kwargs)
    _gather_arguments(dispatcher, names, "tensors", "grad_tensors")
    if (inputs := names.get("inputs")) is not None:
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        names["inputs"] = [local_of(x) for x in inputs]
    return dispatcher.engine(func)(**names)


ENGINES = {torch.autograd.grad: grad, torch.autograd.backward: backward}
ANSWERS.update(ENGINES)

RECOMPUTING = frozenset([*ENGINES, Tensor.backward])
"""Functions of autograd in which a checkpoint may run a part of the forward again. A mode that answers them is off meanwhile;
one that is to see that part runs their ``private.python_body`` under itself."""


@answer("register_hook")
def register_hook(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook gets the gradient as a global tensor; the gradient that it returns is sharded like the tensor."""
    x, hook = (*args, *kwargs.values())
    layout = x._mw_layout
    if not isinstance(layout, Shard):  # the gradient of a summand is whole
        return x._mw_local.register_hook(hook)

    def of_local(gradient: Tensor) -> Any:
        changed = hook(dispatcher.global_tensor(gradient, layout))
        return None if changed is None else dispatcher.shard(changed, layout)

    return x._mw_local.register_hook(of_local)


@answer("retain_grad")
def retain_grad(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0]._mw_local.retain_grad()


def grad_of(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _global_gradient(dispatcher, args[0]._mw_local.grad, args[0])


ANSWERS[getattr(Tensor, "grad").__get__] = grad_of  # noqa: B009  (a property of the class, not of a tensor)
