"""What a callable object is made of: the function it calls, what that is closed over, and default values of its arguments."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

ABSENT: Any = object()
"""Stands for the value of what has none: a variable that is not assigned yet, a name that is not in a namespace."""

_NOT_OF_MODEL = frozenset(["torch", "meshwright", "numpy"]) | sys.stdlib_module_names


def is_of_no_model(name: str) -> bool:
    """Whether a Python module is a part of torch, NumPy, this library or the standard library. ``name``: its full name."""
    return name.partition(".")[0] in _NOT_OF_MODEL


def content(cell: types.CellType) -> Any:
    """The value of a variable over which a function is closed; ABSENT if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def cells(function: types.FunctionType) -> list[types.CellType]:
    """The cells of the variables over which a function is closed, without those that are not assigned yet."""
    return [cell for cell in function.__closure__ or () if content(cell) is not ABSENT]


def contents(function: types.FunctionType) -> list[Any]:
    """The values of the variables over which a function is closed."""
    return [cell.cell_contents for cell in cells(function)]


def defaults(function: types.FunctionType) -> list[Any]:
    """The default values of a function's arguments."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def parts(value: Any) -> list[Any] | None:
    """The functions and values of which a callable object or a descriptor is made; None for another object, a function among
    them."""
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [] if isinstance(value, types.BuiltinFunctionType) else None
