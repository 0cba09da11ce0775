"""Facts as plain values that JSON takes, and back: dataclasses, named and other tuples, mappings, by the types of their fields.

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
    """A value as dicts, lists, text, numbers and None. A mapping whose keys are no text is a list of pairs."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(one) for key, one in value.items()}
        return [[to_plain(key), to_plain(one)] for key, one in value.items()]
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """The inverse of `to_plain`.

    Raises:
        TypeError, KeyError: these values are not of this type.
    """
    made: T = _made(kind, data)
    return made


def _made(kind: Any, data: Any) -> Any:
    if kind is Any:
        return data
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _of_several(of, data)
    if origin is tuple:
        if len(of) == 2 and of[1] is Ellipsis:
            return tuple(_made(of[0], one) for one in data)
        return tuple(_made(one, value) for one, value in zip(of, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        pairs = data.items() if isinstance(data, Mapping) else data
        return {_made(of[0], key): _made(of[1], one) for key, one in pairs}
    if origin is not None and issubclass(origin, Sequence):
        return [_made(of[0], one) for one in data]
    if is_dataclass(kind):
        make: Any = kind
        hints = _hints(make)
        return make(**{name: _made(hints[name], one) for name, one in data.items()})
    if _is_named(kind):
        return kind(*(_made(hint, one) for hint, one in zip(_hints(kind).values(), data, strict=True)))
    if not isinstance(data, (kind, int) if kind is float else kind):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data


def _of_several(kinds: Sequence[Any], data: Any) -> Any:
    """A value of the first type that it can be; of dataclasses, of that with these fields; a named tuple of a list as long."""
    for kind in kinds:
        if kind is types.NoneType:
            if data is None:
                return None
        elif is_dataclass(kind):
            if isinstance(data, Mapping) and set(data) == {field.name for field in fields(kind)}:
                return _made(kind, data)
        elif _is_named(kind):
            if isinstance(data, (tuple, list)) and len(data) == len(_hints(kind)):
                return _made(kind, data)
        elif data is not None:
            return _made(kind, data)
    raise TypeError(f"{data!r} is none of {kinds}")


def _is_named(kind: Any) -> bool:
    """Whether it is a class of named tuples."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
