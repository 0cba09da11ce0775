"""Converts dataclasses, named and other tuples, and mappings to plain values for JSON, and back by the types of their fields.

>>> from meshwright.mesh import Mesh
>>> to_plain(Mesh.parse("dp_shard=2,tp=2"))
{'axes': [['dp_shard', 2], ['tp', 2]]}
>>> from_plain(Mesh, to_plain(Mesh.parse("tp=2"))).size
2
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A value as dicts, lists, text, numbers and None. A mapping with keys that are not text becomes a list of pairs."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """The value of a type from its plain form; the inverse of `to_plain`.

    Raises:
        TypeError, KeyError: the plain values do not fit the type.
    """
    value: T = _value(kind, data)
    return value


def _value(kind: Any, data: Any) -> Any:
    """The value of a type, which may be a union, a tuple, a mapping, a sequence, a dataclass or a plain type."""
    if kind is Any:
        return data
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _value_of_union(arguments, data)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_value(arguments[0], item) for item in data)
        return tuple(_value(argument, item) for argument, item in zip(arguments, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        pairs = data.items() if isinstance(data, Mapping) else data
        return {_value(arguments[0], key): _value(arguments[1], item) for key, item in pairs}
    if origin is not None and issubclass(origin, Sequence):
        return [_value(arguments[0], item) for item in data]
    if is_dataclass(kind):
        constructor: Any = kind
        hints = _hints(constructor)
        return constructor(**{name: _value(hints[name], item) for name, item in data.items()})
    if _is_named(kind):
        return kind(*(_value(hint, item) for hint, item in zip(_hints(kind).values(), data, strict=True)))
    if not isinstance(data, (kind, int) if kind is float else kind):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data


def _value_of_union(kinds: Sequence[Any], data: Any) -> Any:
    """The value of the first type of a union that fits.

    A dataclass fits if it has the same fields as the data; a named tuple if it has as many.
    """
    for kind in kinds:
        if kind is types.NoneType:
            if data is None:
                return None
        elif is_dataclass(kind):
            if isinstance(data, Mapping) and set(data) == {field.name for field in fields(kind)}:
                return _value(kind, data)
        elif _is_named(kind):
            if isinstance(data, (tuple, list)) and len(data) == len(_hints(kind)):
                return _value(kind, data)
        elif data is not None:
            return _value(kind, data)
    raise TypeError(f"{data!r} is none of {kinds}")


def _is_named(kind: Any) -> bool:
    """Whether it is a class of named tuples."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
