"""The tables of torch functions: which decider, or which direct answer, each function has.

    DECIDERS   torch function → decider: a ``Call`` → a ``Decision``, ``Body`` or ``Gather`` (see ``decision``)
    ANSWERS    torch function → ``answer(dispatcher, func, args, kwargs)``, if there is nothing to decide: facts of memory and
               of autograd, in which the wrapper and the local tensor differ; and a backward within a forward

One decider serves a function under all its names (``torch.add``, ``Tensor.add``, ``Tensor.__add__``, ``Tensor.add_`` …).
What torch itself says of its functions is in ``torch_functions``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from meshwright.spmd.decision import Answer
from meshwright.spmd.signature import Call
from meshwright.spmd.torch_functions import functions

AnswerTo = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
ANSWERS: dict[Any, AnswerTo] = {}
Decider = Callable[[Call], Answer]
DECIDERS: dict[Any, Decider] = {}
ELEMENTWISE: set[Any] = set()  # elementwise functions, with broadcasting


def answer(*names: str) -> Callable[[AnswerTo], AnswerTo]:
    """Registers the function that answers the torch functions with these names."""

    def register(fn: AnswerTo) -> AnswerTo:
        for name in names:
            for func in functions(name):
                ANSWERS[func] = fn
        return fn

    return register


def decider(*names: str) -> Callable[[Decider], Decider]:
    """Registers a decider for the torch functions with these names."""

    def register(fn: Decider) -> Decider:
        for name in names:
            for func in functions(name):
                DECIDERS[func] = fn
        return fn

    return register


def named(order: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by name. ``order``: the names of the positional arguments, separated by spaces."""
    return {**defaults, **dict(zip(order.split(), args, strict=False)), **kwargs}


_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_ORDER: dict[str, dict[str, Any]] = {  # arguments after the tensor, in order, with their defaults; ... : no default
    "select": {"dim": ..., "index": ...},
    "narrow": {"dim": ..., "start": ..., "length": ...},
    "movedim": {"source": ..., "destination": ...},
    "moveaxis": {"source": ..., "destination": ...},
    "flatten": {"start_dim": 0, "end_dim": -1},
    "unflatten": {"dim": ..., "sizes": ...},
    "chunk": {"chunks": ..., "dim": 0},
    "unsafe_chunk": {"chunks": ..., "dim": 0},
    "split_with_sizes": {"split_sizes": ..., "dim": 0},
    "unsafe_split": {"split_size": ..., "dim": 0},
}


def ordered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as deciders expect them: the tensor first, NumPy's names replaced by torch's, keywords in order.

    A builtin function gets the arguments as the caller wrote them. A function written in Python has ordered them already.
    """
    if isinstance(func, types.FunctionType) or not kwargs or (func not in DECIDERS and func not in ANSWERS):
        return args, kwargs
    kwargs = {_NUMPY.get(k, k): v for k, v in kwargs.items()}
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    order = _ORDER.get(func.__name__)
    if order is not None and args and kwargs.keys() <= order.keys():
        by_name = dict(zip(order, args[1:], strict=False)) | kwargs
        args, kwargs = (args[0], *(by_name.get(k, default) for k, default in order.items())), {}
    return args, kwargs
