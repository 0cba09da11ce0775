"""The Python state that a block's forward may read: as it was when the forward was recorded, compared before each replay.

    of each module of the block   its attributes, its children, its hooks
    within its attributes         the items of lists, dicts and sets, and the attributes of plain objects, some levels deep
    of its code                   the same of what is a global of the code that ran; and what its classes have

Equal means the same object, or one that is equal to it. A tensor is the same object: another one is another state.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from meshwright.blame import is_of_model
from meshwright.private import has_hooks


class Incomparable(Exception):
    """Something that a block keeps cannot be compared with what it was; the text says what."""


class ModuleState:
    """What a block keeps in Python.

    Args:
        codes: code of the model's that ran, with its globals.

    Raises:
        Incomparable: part of it cannot be compared.
    """

    def __init__(self, block: nn.Module, codes: Mapping[types.CodeType, dict[str, Any]]) -> None:
        self._block, self._modules = block, list(block.modules())
        kept = _Kept()
        for module in self._modules:
            kept.add_module(module)
        self._names = [*_globals(codes), *_of_classes(self._modules)]
        for _, name, value in self._names:
            kept.add(value, name, _DEPTH, strict=False)
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
_MOST_ITEMS, _MOST_TABLES = 256, 200
_WORDS = (bool, int, float, complex, str, bytes, type(None), type(...), range, frozenset, enum.Enum)
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, property)
_OF_TORCH = frozenset(vars(nn.Module()))


class _Kept:
    """(a container, a copy of it) for each container that is found; each once."""

    def __init__(self) -> None:
        self.tables: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()

    def add_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        self.tables += [(attributes, dict(attributes)), (module._modules, dict(module._modules))]
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                self.add(value, name, _DEPTH, strict=True)

    def add(self, value: Any, name: str, depth: int, *, strict: bool) -> None:
        """``strict``: what cannot be compared is an error, and not left out."""
        if isinstance(value, (_WORDS, *_CODE, Tensor, nn.Module)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        items = _items(value)
        if items is None:
            if strict and not callable(value) and not type(value).__module__.startswith("torch"):
                raise Incomparable(f"{name} is of the type {type(value).__name__}, which may change unseen")
            return
        if depth == 0 or len(items) > _MOST_ITEMS or len(self.tables) > _MOST_TABLES:
            if strict:
                raise Incomparable(f"{name} has too much in it to be compared in each call")
            return
        if not isinstance(value, tuple):
            container = value if isinstance(value, (list, dict, set, deque)) else vars(value)
            self.tables.append((container, container.copy()))
        for item in items:
            self.add(item, name, depth - 1, strict=strict)


def _items(value: Any) -> list[Any] | None:
    """What is in a container, or in the attributes of a plain object; None if it is neither."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if callable(value) or type(value).__module__.startswith(("torch", "meshwright")):
        return None
    return list(vars(value).values()) if hasattr(value, "__dict__") else None


def _globals(codes: Mapping[types.CodeType, dict[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    seen: set[tuple[int, str]] = set()
    for code, space in codes.items():
        for name in code.co_names:
            if name in space and not isinstance(space[name], _CODE) and (id(space), name) not in seen:
                seen.add((id(space), name))
                yield space, name, space[name]


def _of_classes(block: list[nn.Module]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    kinds = {kind for m in block for kind in type(m).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))}
    for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
        for name, value in vars(kind).items():
            if not name.startswith("__") and not isinstance(value, _CODE) and not hasattr(value, "__get__"):
                yield vars(kind), name, value


def code_of_model(code: types.CodeType) -> bool:
    """Whether code is the model's."""
    return is_of_model(code.co_filename)
