"""While a function mode of this package is on, nothing runs compiled.

    compiled functions       run as the plain functions that they were compiled from
    torch's control flow     ``torch.cond``, ``while_loop``, ``scan``, ``map`` and ``associative_scan`` run as the Python that
                             their documentation says they stand for

torch compiles a call of its control flow to find the parameters that the branches use by closure. Run otherwise, autograd
would trace the branches with tensors that have no values, and fail at the first parameter. As Python, the branches are the
model's own code: a mode sees their functions, and that a condition is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree
from meshwright.spmd import patches

Function = Callable[..., Any]
Values = Sequence[Any]


def _cond(pred: Any, true_fn: Function, false_fn: Function, operands: Values) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Function, body_fn: Function, carried: Values, others: Values) -> Any:
    if not cond_fn(*carried, *others):
        copies = [value.clone() if isinstance(value, Tensor) else value for value in carried]
        return pytree.tree_unflatten(copies, pytree.tree_structure(body_fn(*carried, *others)))
    result = body_fn(*carried, *others)
    while cond_fn(*pytree.tree_leaves(result), *others):
        result = body_fn(*pytree.tree_leaves(result), *others)
    return result


def _scan(combine_fn: Function, init: Values, xs: Sequence[Tensor], others: Values) -> tuple[Any, Any]:
    carried, outputs = init, list[Any]()
    for slices in zip(*xs, strict=True):
        result, output = combine_fn(*carried, *slices, *others)
        carried = pytree.tree_leaves(result)
        outputs.append(output)
    return result, _stacked(outputs)


def _map(f: Function, xs: Sequence[Tensor], others: Values) -> Any:
    return _stacked([f(*slices, *others) for slices in zip(*xs, strict=True)])


def _associative_scan(combine_fn: Function, xs: Sequence[Tensor], others: Values) -> Any:
    first, *rest = zip(*xs, strict=True)
    outputs: list[Any] = [pytree.tree_unflatten(first, pytree.tree_structure(combine_fn(*first, *first, *others)))]
    for slices in rest:
        outputs.append(combine_fn(*pytree.tree_leaves(outputs[-1]), *slices, *others))
    return _stacked(outputs)


def _stacked(outputs: Sequence[Any]) -> Any:
    """The outputs of all iterations, trees of tensors, as one tree: each tensor is stacked along dim 0."""
    return pytree.tree_map(lambda *tensors: torch.stack(tensors), *outputs)


AS_PYTHON: dict[str, Function] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "associative_scan": _associative_scan,
}
"""The name of a higher-order operator → a function that runs it as Python. Tensors come as flat sequences; what functions of
the model return is a tree, and so is the result. What each computes is documented at
https://docs.pytorch.org/docs/stable/higher_order_ops/index.html"""


def _as_python(call: Function) -> Function:
    """``HigherOrderOperator.__call__``, of which control flow runs as Python."""

    def called(operator: Any, *args: Any, **kwargs: Any) -> Any:
        # What is compiled in another thread meanwhile stays as it is.
        if (function := AS_PYTHON.get(operator.name())) is None or torch.compiler.is_compiling():
            return call(operator, *args, **kwargs)
        return function(*args, **kwargs)

    return called


def _with_control_flow_as_python(function: Function) -> Function:
    """A function of torch's that calls an operator of its control flow."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with patches.CONTROL_FLOW.on(_as_python):  # here alone: to patch a class that has many subclasses takes long
            return function(*args, **kwargs)

    return called


class Uncompiled:
    """One for the process. While it is on, nothing runs compiled.

    Modes of several threads begin and end in any order: the first one turns it on, the last one turns it off.

    The compiler takes seconds to import. If it is not imported yet, nothing has been compiled; it is told when the first
    function is compiled.
    """

    def __init__(self) -> None:
        self._users = 0
        self._stance: AbstractContextManager[None] | None = None
        self._patches = ExitStack()

    def enter(self) -> None:
        with patches.LOCK:
            if self._users == 0:
                self._patches.enter_context(patches.COMPILE.on(self._told))
            self._users += 1
            if "torch._dynamo" in sys.modules:
                self._tell()

    def leave(self) -> None:
        with patches.LOCK:
            self._users -= 1
            if self._users:
                return
            self._patches.close()
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    @contextmanager
    def on(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _tell(self) -> None:
        """Tells the compiler, which is imported, that nothing runs compiled."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()

    def _told(self, compile_: Function) -> Function:
        """``torch.compile``, which tells the compiler first. What torch's control flow compiles runs its branches as Python."""

        def compiled(model: Any = None, **kwargs: Any) -> Any:
            with patches.LOCK:
                self._tell()
            if getattr(model, "__module__", "").startswith("torch._higher_order_ops."):
                return _with_control_flow_as_python(model)
            return compile_(model, **kwargs)

        return compiled


UNCOMPILED = Uncompiled()


def compiling() -> AbstractContextManager[None]:
    """Within the block, compiled functions run compiled, also if ``UNCOMPILED`` is on."""
    return torch.compiler.set_stance("default")
