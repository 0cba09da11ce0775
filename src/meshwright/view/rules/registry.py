"""The tables: what is known of each torch function.

    DECIDERS   torch function → decider: a call's signature → what is to be done (``decision``)
    ANSWERS    torch function → ``answer(work, func, args, kwargs)``, where there is nothing to decide: facts of memory and of
               autograd, in which the wrapper and the local tensor differ, and backwards within a forward

One decider serves a function under all its names (``torch.add``, ``Tensor.add``, ``Tensor.__add__``, ``Tensor.add_`` …).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.view.decision import Answer
from meshwright.view.signature import Call

AnswerTo = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
ANSWERS: dict[Any, AnswerTo] = {}
Decider = Callable[[Call], Answer]
DECIDERS: dict[Any, Decider] = {}
ELEMENTWISE: set[Any] = set()  # functions of each element, with broadcasting

_PLACES = (torch, Tensor, functional, torch._C._nn, torch.special, torch.linalg, torch._VF)


def functions(name: str) -> Iterator[Any]:
    """Every torch function of that name: in torch, as a method, in torch.nn.functional …"""
    for place in _PLACES:
        found = getattr(place, name, None)
        if callable(found):
            yield found


def answer(*names: str) -> Callable[[AnswerTo], AnswerTo]:
    """Registers what answers the functions of these names."""

    def register(fn: AnswerTo) -> AnswerTo:
        for name in names:
            for func in functions(name):
                ANSWERS[func] = fn
        return fn

    return register


def decider(*names: str) -> Callable[[Decider], Decider]:
    """Registers a decider for the functions of these names."""

    def register(fn: Decider) -> Decider:
        for name in names:
            for func in functions(name):
                DECIDERS[func] = fn
        return fn

    return register


def named(order: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by name; ``order``: the names of those that may be given by place."""
    return {**defaults, **dict(zip(order.split(), args, strict=False)), **kwargs}


def _facts() -> frozenset[Any]:
    properties = (
        "shape dtype device layout ndim is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested is_mps \
        is_xpu is_sparse_csr itemsize names".split()
    )
    methods = (
        "size dim numel nelement element_size is_floating_point is_complex get_device ndimension __len__ is_signed \
        is_conj is_neg is_inference is_same_size result_type _has_compatible_shallow_copy_type".split()
    )
    return frozenset(
        [getattr(Tensor, p).__get__ for p in properties if hasattr(Tensor, p)]
        + [f for m in methods for f in functions(m)]
    )


FACTS = _facts()

_WRITES = (
    frozenset(
        f
        for place in (Tensor, torch)
        for name in dir(place)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        for f in [getattr(place, name)]
        if callable(f) and name not in ("requires_grad_", "retain_grad_", "is_shared_", "share_memory_")
    )
    | frozenset(
        getattr(Tensor, f"__i{op}__")
        for op in "add sub mul truediv floordiv pow and or xor lshift rshift mod".split()
        if hasattr(Tensor, f"__i{op}__")
    )
    | frozenset([Tensor.data.__set__])  # type: ignore[attr-defined]
    | frozenset(getattr(functional, n) for n in dir(functional) if n.endswith("_") and not n.startswith("_"))
)


# Functions that change a tensor's shape in place, and what gives the same as a new tensor.
RESHAPING = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in "squeeze unsqueeze transpose t swapaxes swapdims as_strided".split()
} | {torch.as_strided_: Tensor.as_strided}


# Functions that give a view or a copy, by how their argument lies.
SOMETIMES = frozenset(
    f for n in "reshape view flatten unflatten ravel view_as reshape_as contiguous".split() for f in functions(n)
)

# How the result lies depends on the kernel, and meta's is another.
BY_DEVICE = frozenset([functional.scaled_dot_product_attention])

_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_ORDER: dict[str, dict[str, Any]] = {  # of the arguments after the tensor, with defaults; ... where there is none
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
    """The arguments as rules expect them: the tensor first, NumPy's words translated, keywords in their order.

    Builtin functions hand over what the caller wrote; those written in Python have put it in order already.
    """
    if isinstance(func, types.FunctionType) or not kwargs or (func not in DECIDERS and func not in ANSWERS):
        return args, kwargs
    kwargs = {_NUMPY.get(k, k): v for k, v in kwargs.items()}
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    order = _ORDER.get(func.__name__)
    if order is not None and args and kwargs.keys() <= order.keys():
        given = dict(zip(order, args[1:], strict=False)) | kwargs
        args, kwargs = (args[0], *(given.get(k, default) for k, default in order.items())), {}
    return args, kwargs


def writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` writes to its first argument."""
    if func in _WRITES or kwargs.get("inplace"):
        return True
    place = _INPLACE.get(func)
    return place is not None and len(args) > place and bool(args[place])


def writes_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The same of a call as a person writes it: the tensor may have a name."""
    return (bool(args) or "input" in kwargs) and writes(func, args, kwargs)


def _inplace_places() -> dict[Any, int]:
    """Functions with an argument ``inplace``, and which one it is when it is given by place."""
    found = {}
    for func in vars(functional).values():
        if isinstance(func, FunctionType):
            names = list(signature(func).parameters)
            if "inplace" in names:
                found[func] = names.index("inplace")
    return found


_INPLACE = _inplace_places()
