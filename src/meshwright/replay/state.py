"""``ModuleState``: the Python state that a block's forward may read, when it was recorded. It is compared before each replay.

    each module of the block   its attributes, its children, its hooks
    within its attributes      items of lists, dicts and sets, elements of arrays, attributes of plain objects and of modules
                               outside the block, some levels deep
    its code                   globals of code that ran (with their items, as above); attributes and functions of its classes;
                               attributes of Python modules and classes that the code reads by name; closures and defaults of
                               its functions

A value is unchanged if it is the same object or equal to it. A tensor must be the same object. State that is too large to be
compared in each call is an error, since it might change unseen.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from meshwright.blame import is_of_model
from meshwright.callables import ABSENT, cells, contents, defaults, is_of_no_model
from meshwright.private import has_hooks
from meshwright.replay.functions import Codes, Free, functions_in, missing_function


class Incomparable(Exception):
    """A part of a block's Python state cannot be compared; the text says which."""


class ModuleState:
    """A snapshot of a block's Python state when it is created.

    Args:
        block: the block.
        codes: the model's code that ran → its globals.
        free: such code → the values of its free variables at its first call.

    Raises:
        Incomparable: part of it cannot be compared.
    """

    def __init__(self, block: nn.Module, codes: Codes, free: Free | None = None) -> None:
        self._block, self._modules = block, list(block.modules())
        snapshot = _Snapshot(self._modules)
        for module in self._modules:
            snapshot.add_module(module, strict=True)
        self._names = [*_globals(codes), *_class_attributes(self._modules, codes)]
        for _, name, value in self._names:
            snapshot.add(value, name, _DEPTH, strict=False)
        functions = functions_in(self._modules, codes)
        if name := missing_function(functions, codes, free or {}):
            raise Incomparable(f"function {name} is closed over what may change unseen")
        for function in functions:
            snapshot.add_function(function)
        self._tables = snapshot.tables

    def holds(self) -> bool:
        """Whether the state is unchanged."""
        try:
            for now, before in self._tables:
                if now != before:
                    return False
            for space, name, value in self._names:
                now = space.get(name, ABSENT)
                if now is not value and (type(now) is not type(value) or now != value):
                    return False
        except (RuntimeError, ValueError, TypeError):  # a comparison with a new tensor or array fails
            return False
        if modules._has_any_global_hook():
            return False
        return not any(has_hooks(m) for m in self._modules if m is not self._block)


_DEPTH = 4  # levels of containers within containers
_MOST_ITEMS, _MOST_TABLES, _MOST_MODULES, _MOST_BYTES = 1024, 200, 8, 1 << 14
_WORDS = (bool, int, float, complex, str, bytes, type(None), type(...), range, frozenset, enum.Enum)
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, property)
_OF_TORCH = frozenset(vars(nn.Module()))


class _Variable:
    """A variable of a closure; ``variable != before`` compares its current value."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __ne__(self, before: object) -> bool:
        now = self._cell.cell_contents
        return now is not before and (type(now) is not type(before) or bool(now != before))


class _Reading:
    """Items that are in no container (elements of an array, slots); ``reading != before`` reads them again and compares."""

    def __init__(self, read: Callable[[Any], Any], value: Any) -> None:
        self._read, self._value = read, value

    def __ne__(self, before: object) -> bool:
        return bool(self._read(self._value) != before)


class _Snapshot:
    """Collects the containers that are to be compared.

    Attributes:
        tables: (container, a copy of it), each container once.
    """

    def __init__(self, block: Iterable[nn.Module]) -> None:
        self.tables: list[tuple[Any, Any]] = []
        self._seen: set[int] = set(map(id, block))

    def add_module(self, module: nn.Module, *, strict: bool) -> None:
        attributes = vars(module)
        self.tables += [(attributes, dict(attributes)), (module._modules, dict(module._modules))]
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                self.add(value, name, _DEPTH, strict=strict)

    def add_function(self, function: types.FunctionType) -> None:
        """Adds the closure of a function and the defaults of its arguments."""
        self.tables += [(_Variable(cell), cell.cell_contents) for cell in cells(function)]
        for value in (*contents(function), *defaults(function)):
            self.add(value, function.__name__, _DEPTH, strict=False)

    def add(self, value: Any, name: str, depth: int, *, strict: bool) -> None:
        """Adds a value with the containers within it, ``depth`` levels deep.

        Args:
            name: the name for error texts.
            strict: whether an object that cannot be compared is an error; else it is left out.

        Raises:
            Incomparable: the value cannot be compared (an iterator would move on), or has too many items.
        """
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, (_WORDS, *_CODE, Tensor)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._add_elsewhere(value, name)
            return
        self._seen.add(id(value))
        if isinstance(value, Iterator):
            raise Incomparable(f"{name} is an iterator, which moves on unseen")
        if _is_buffer(value):
            if memoryview(value).nbytes > _MOST_BYTES:
                raise Incomparable(f"{name} has too much in it to be compared in each call")
            self.tables.append((_Reading(_elements, value), _elements(value)))
            return
        items = _items(value)
        if items is None:
            if strict and not callable(value) and not _is_known(value):
                raise Incomparable(f"{name} is of the type {type(value).__name__}, which may change unseen")
            return
        if depth == 0 or len(items) > _MOST_ITEMS or len(self.tables) > _MOST_TABLES:
            raise Incomparable(f"{name} has too much in it to be compared in each call")
        if (container := _container(value)) is None:
            self.tables.append((_Reading(_slots, value), _slots(value)))
        elif not isinstance(value, tuple):
            self.tables.append((container, _copy(container)))
        for item in items:
            self.add(item, name, depth - 1, strict=strict)

    def _add_elsewhere(self, module: nn.Module, name: str) -> None:
        """Adds a module outside the block: a global of a file that is a module, or the model around the block."""
        within = [m for m in module.modules() if id(m) not in self._seen]
        if len(within) > _MOST_MODULES:
            raise Incomparable(
                f"{name} is a module around it, or beside it, with too much in it to be compared in each call"
            )
        self._seen.update(map(id, within))
        for m in within:
            self.add_module(m, strict=False)


def _items(value: Any) -> list[Any] | None:
    """The items of a container, or the attribute values of a plain object; None for another value."""
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, (list, tuple, set, deque)):
        return list(iter(value))  # ``list(value)`` would ask a class of the model for its length
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if _is_known(value) or isinstance(value, logging.Logger):
        return None
    if hasattr(value, "__dict__"):
        return list(vars(value).values())
    return list(_slots(value)) or None


def _copy(container: Any) -> Any:
    """A copy that equals the container until the container changes.

    It has the values that a dict stores. A class of the model may return others from ``__getitem__`` or ``__iter__``.
    """
    if isinstance(container, OrderedDict):
        return OrderedDict((key, dict.__getitem__(container, key)) for key in OrderedDict.__iter__(container))
    return dict(dict.items(container)) if isinstance(container, dict) else container.copy()


def _slots(value: Any) -> tuple[Any, ...]:
    """The values in the ``__slots__`` of an object."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for of_class in slots for name in ([of_class] if isinstance(of_class, str) else of_class)]
    return tuple(getattr(value, name, ABSENT) for name in names)


def _is_buffer(value: Any) -> bool:
    """Whether a value is an array of numbers: of numpy, ``array`` or bytes."""
    try:
        return bool(memoryview(value).format != "O")
    except (TypeError, ValueError):
        return False


def _elements(array: Any) -> bytes:
    """The elements of an array, as bytes."""
    return memoryview(array).tobytes()


def _is_known(value: Any) -> bool:
    """Whether a value's class is torch's or ours: a module may have a bound method of such an object (a wrapped forward)."""
    return type(value).__module__.startswith(("torch", "meshwright"))


def _container(value: Any) -> Any:
    """The container that holds the items of a value; None if they are in slots."""
    if isinstance(value, functools.partial):
        return value.keywords
    return value if isinstance(value, (list, dict, set, deque, tuple)) else getattr(value, "__dict__", None)


def _globals(codes: Codes) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    seen: set[tuple[int, str]] = set()
    for code, space in codes.items():
        for name in code.co_names:
            for table, (key, value) in _named(space, name, code.co_names):
                if not isinstance(value, types.ModuleType) and (id(table), key) not in seen:
                    seen.add((id(table), key))
                    yield table, key, value


def _named(
    space: Mapping[str, Any], name: str, names: tuple[str, ...], depth: int = 3
) -> Iterator[tuple[Mapping[str, Any], tuple[str, Any]]]:
    """The values that a name in code may mean: (dict, (name, value)). For a Python module or class of the model, also its
    attributes that other names of the code may mean."""
    if name not in space:
        return
    value = space[name]
    yield space, (name, value)
    if not depth or not isinstance(value, (types.ModuleType, type)) or not _is_of_model(value):
        return
    for within in [vars(value)] if isinstance(value, types.ModuleType) else map(vars, value.__mro__):
        for other in names:
            if other != name:
                yield from _named(within, other, names, depth - 1)


def _is_of_model(value: Any) -> bool:
    """Whether a Python module or class is the model's: no part of torch, NumPy, this library or the standard library."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return not is_of_no_model(name)


def _class_attributes(block: list[nn.Module], codes: Codes) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Attributes of the modules' classes: values; and functions and properties whose names are in code that ran.

    Yields:
        (the class's dict, name, value).
    """
    kinds = {kind for m in block for kind in type(m).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))}
    named = {name for code in codes for name in code.co_names}
    for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
        for name, value in vars(kind).items():
            is_value = not isinstance(value, _CODE) and not hasattr(value, "__get__")
            if name in named or (is_value and not name.startswith("__")):
                yield vars(kind), name, value


def code_of_model(code: types.CodeType) -> bool:
    """Whether code is the model's."""
    return is_of_model(code.co_filename)
