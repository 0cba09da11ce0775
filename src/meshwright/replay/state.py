"""The Python state that a block's forward may read: as it was when the forward was recorded, compared before each replay.

    of each module of the block   its attributes, its children, its hooks
    one level down                lists, dicts and plain objects that are attributes: their items
    of its code                   numbers, texts and flags that are globals of the code that ran, or attributes of its classes

Equal means the same object, or one that is equal to it. A tensor is the same object: another one is another state.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from meshwright.blame import is_of_model
from meshwright.private import has_hooks

_WORDS = (bool, int, float, str, bytes, type(None))
_MOST = 256  # items of a container that are compared


class ModuleState:
    """What a block keeps in Python.

    Args:
        codes: code of the model's that ran, with its globals.
    """

    def __init__(self, block: nn.Module, codes: Mapping[types.CodeType, dict[str, Any]]) -> None:
        self._modules = list(block.modules())
        self._block = block
        self._tables: list[tuple[Any, Any]] = []
        for module in self._modules:
            self._tables += [(vars(module), dict(vars(module))), (module._modules, dict(module._modules))]
        self._tables += _within(self._modules)
        self._names = [*_globals(codes), *_of_classes(self._modules)]

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        try:
            for now, before in self._tables:
                if now != before:
                    return False
        except (RuntimeError, ValueError, TypeError):  # a tensor or an array in the place of another
            return False
        for space, name, value in self._names:
            if space.get(name, _ABSENT) is not value and space.get(name, _ABSENT) != value:
                return False
        if modules._has_any_global_hook():
            return False
        return not any(has_hooks(m) for m in self._modules if m is not self._block)


_ABSENT = object()


def _within(block: list[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """(a container, a copy of it) for the lists, dicts, sets and plain objects that are attributes of modules, each once."""
    seen: set[int] = set()
    for module in block:
        for name, value in vars(module).items():
            if id(value) in seen or name in _OF_TORCH:
                continue
            seen.add(id(value))
            if isinstance(value, (list, dict, set)) and len(value) <= _MOST:
                yield value, value.copy()
            elif _is_plain(value):
                yield vars(value), dict(vars(value))


_OF_TORCH = frozenset(vars(nn.Module()))


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of the model's own with attributes, a configuration say."""
    if isinstance(value, (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "functools", "meshwright"))


def _globals(codes: Mapping[types.CodeType, dict[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    seen: set[tuple[int, str]] = set()
    for code, space in codes.items():
        for name in code.co_names:
            if isinstance(space.get(name, _ABSENT), _WORDS) and (id(space), name) not in seen:
                seen.add((id(space), name))
                yield space, name, space[name]


def _of_classes(block: list[nn.Module]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    kinds = {kind for m in block for kind in type(m).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))}
    for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
        for name, value in vars(kind).items():
            if isinstance(value, _WORDS) and not name.startswith("__"):
                yield vars(kind), name, value


def code_of_model(code: types.CodeType) -> bool:
    """Whether code is the model's."""
    return is_of_model(code.co_filename)
