"""Finds the function objects that a block's forward calls, for their closures and the defaults of their arguments.

A code object that ran does not know its function. So the functions are searched where a forward gets functions from: classes of
its modules, their attributes, globals of code that ran, closures (a decorator's wrapped function) and partials.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.callables import contents, defaults, parts

Codes = Mapping[types.CodeType, dict[str, Any]]
"""Code → its globals."""
Free = Mapping[types.CodeType, tuple[Any, ...]]
"""Code → the values of its free variables at its first call."""


def functions_in(block: Iterable[nn.Module], codes: Codes) -> list[types.FunctionType]:
    """The functions whose code ran, as far as the search finds them. ``codes``: code that ran."""
    functions: dict[int, types.FunctionType] = {}
    seen: set[int] = set()
    waiting = [*_in_modules(block), *_in_globals(codes)]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and value.__code__ in codes:
            functions[id(value)] = value
        waiting += _around(value)
    return list(functions.values())


def missing_function(functions: Iterable[types.FunctionType], codes: Codes, free: Free) -> str:
    """The name of a function that ran, has free variables that may change, and is not among ``functions``; "" if none."""
    known = {f.__code__ for f in functions}
    # Functions that the forward itself makes: their code is a constant of code that ran.
    nested = {c for code in codes for c in code.co_consts if isinstance(c, types.CodeType)}
    for code, values in free.items():
        if code not in known and code not in nested and not all(isinstance(v, _FIXED) for v in values):
            return code.co_name
    return ""


_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, nn.Module, Tensor)
_HOLD = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)


def _in_modules(block: Iterable[nn.Module]) -> Iterator[Any]:
    for module in block:
        yield from vars(module).values()
        for kind in type(module).__mro__:
            if not kind.__module__.startswith("torch."):
                yield from vars(kind).values()


def _in_globals(codes: Codes) -> Iterator[Any]:
    for code, space in codes.items():
        for name in code.co_names:
            value = space.get(name)
            if isinstance(value, types.ModuleType):
                yield from (vars(value).get(n) for n in code.co_names)
            yield value


def _around(value: Any) -> list[Any]:
    """The objects to which a value leads in the search, if it is a kind of function or a container of functions."""
    if isinstance(value, types.FunctionType):
        return [*contents(value), *defaults(value)]
    if (within := parts(value)) is not None:
        return within
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return [x for x in items if isinstance(x, _HOLD)]
    if isinstance(value, (type, nn.Module, Tensor)) or not callable(value):
        return []
    return [type(value).__call__]
