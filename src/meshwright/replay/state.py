"""The Python state that a block's forward may read: as it was when the forward was recorded, compared before each replay.

    of each module of the block   its attributes, its children, its hooks
    within its attributes         the items of lists, dicts and sets, the elements of arrays, and the attributes of plain
                                  objects and of modules elsewhere, some levels deep
    of its code                   the same of what is a global of the code that ran; what its classes have, functions too, and
                                  what it reads of modules and classes by name; what its functions are closed over, and
                                  default to

Equal means the same object, or one that is equal to it. A tensor is the same object: another one is another state. What is too
much to be compared in each call is an error, as it may change unseen.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from meshwright.blame import is_of_model
from meshwright.private import has_hooks
from meshwright.replay.functions import Codes, Free, cells, contents, defaults, functions_in, unfound


class Incomparable(Exception):
    """Something that a block keeps cannot be compared with what it was; the text says what."""


class ModuleState:
    """What a block keeps in Python.

    Args:
        codes: code of the model's that ran, with its globals.
        free: what the free variables of such code were.

    Raises:
        Incomparable: part of it cannot be compared.
    """

    def __init__(self, block: nn.Module, codes: Codes, free: Free | None = None) -> None:
        self._block, self._modules = block, list(block.modules())
        kept = _Kept(self._modules)
        for module in self._modules:
            kept.add_module(module, strict=True)
        self._names = [*_globals(codes), *_of_classes(self._modules, codes)]
        for _, name, value in self._names:
            kept.add(value, name, _DEPTH, strict=False)
        functions = functions_in(self._modules, codes)
        if name := unfound(functions, codes, free or {}):
            raise Incomparable(f"function {name} is closed over what may change unseen")
        for function in functions:
            kept.add_function(function)
        self._tables = kept.tables

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        try:
            for now, before in self._tables:
                if now != before:
                    return False
            for space, name, value in self._names:
                now = space.get(name, _ABSENT)
                if now is not value and (type(now) is not type(value) or now != value):
                    return False
        except (RuntimeError, ValueError, TypeError):  # a tensor or an array in the place of another
            return False
        if modules._has_any_global_hook():
            return False
        return not any(has_hooks(m) for m in self._modules if m is not self._block)


_ABSENT = object()
_DEPTH = 4  # levels of containers within containers
_MOST_ITEMS, _MOST_TABLES, _MOST_MODULES, _MOST_BYTES = 1024, 200, 8, 1 << 14
_WORDS = (bool, int, float, complex, str, bytes, type(None), type(...), range, frozenset, enum.Enum)
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, property)
_OF_TORCH = frozenset(vars(nn.Module()))


class _Variable:
    """A variable that a function is closed over, to be compared with what it was."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __ne__(self, before: object) -> bool:
        now = self._cell.cell_contents
        return now is not before and (type(now) is not type(before) or bool(now != before))


class _Reading:
    """What ``read`` gives of a value, to be compared with what it was: that of which no container holds the items."""

    def __init__(self, read: Callable[[Any], Any], value: Any) -> None:
        self._read, self._value = read, value

    def __ne__(self, before: object) -> bool:
        return bool(self._read(self._value) != before)


class _Kept:
    """(a container, a copy of it) for each container that is found; each once."""

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
        """What a function is closed over, and defaults to."""
        self.tables += [(_Variable(cell), cell.cell_contents) for cell in cells(function)]
        for value in (*contents(function), *defaults(function)):
            self.add(value, function.__name__, _DEPTH, strict=False)

    def add(self, value: Any, name: str, depth: int, *, strict: bool) -> None:
        """``strict``: what cannot be compared is an error, and not left out. An iterator moves on when it is asked."""
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
            self.tables.append((container, container.copy()))
        for item in items:
            self.add(item, name, depth - 1, strict=strict)

    def _add_elsewhere(self, module: nn.Module, name: str) -> None:
        """A module that is none of the block's: a function of the file's that is a module, or the model around the block."""
        within = [m for m in module.modules() if id(m) not in self._seen]
        if len(within) > _MOST_MODULES:
            raise Incomparable(
                f"{name} is a module around it, or beside it, with too much in it to be compared in each call"
            )
        self._seen.update(map(id, within))
        for m in within:
            self.add_module(m, strict=False)


def _items(value: Any) -> list[Any] | None:
    """What is in a container, or in the attributes of a plain object; None if it is neither."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if _is_known(value) or isinstance(value, logging.Logger):
        return None
    if hasattr(value, "__dict__"):
        return list(vars(value).values())
    return list(_slots(value)) or None


def _slots(value: Any) -> tuple[Any, ...]:
    """What stands in the slots of an object."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for of_class in slots for name in ([of_class] if isinstance(of_class, str) else of_class)]
    return tuple(getattr(value, name, _ABSENT) for name in names)


def _is_buffer(value: Any) -> bool:
    """Whether a value is an array of numbers: of numpy, ``array`` or bytes."""
    try:
        return bool(memoryview(value).format != "O")
    except (TypeError, ValueError):
        return False


def _elements(array: Any) -> bytes:
    """Those of an array, as bytes."""
    return memoryview(array).tobytes()


def _is_known(value: Any) -> bool:
    """Whether a value is of torch's own kind, or of ours: a bound method of it may stand on a module, as a wrapped forward."""
    return type(value).__module__.startswith(("torch", "meshwright"))


def _container(value: Any) -> Any:
    """Where the items of a value stand; None if they stand in slots."""
    if isinstance(value, functools.partial):
        return value.keywords
    return value if isinstance(value, (list, dict, set, deque, tuple)) else getattr(value, "__dict__", None)


def _globals(codes: Codes) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    seen: set[tuple[int, str]] = set()
    for code, space in codes.items():
        for name in code.co_names:
            for of, value in _named(space, name, code.co_names):
                if not isinstance(value[1], types.ModuleType) and (id(of), value[0]) not in seen:
                    seen.add((id(of), value[0]))
                    yield of, *value


def _named(
    space: Mapping[str, Any], name: str, names: tuple[str, ...], depth: int = 3
) -> Iterator[tuple[Mapping[str, Any], tuple[str, Any]]]:
    """What a name of code may stand for; of a module or a class, what other names of the code may be in it."""
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
    """Whether a module or class is no part of torch, of ours or of Python."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name.partition(".")[0] not in (_NOT_OF_MODEL | sys.stdlib_module_names)


_NOT_OF_MODEL = frozenset(["torch", "meshwright", "numpy"])


def _of_classes(block: list[nn.Module], codes: Codes) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """What classes of modules have: values; and functions and properties that code names."""
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
