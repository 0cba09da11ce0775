"""``CodeState``: the Python state outside of a model's modules that the model's code may change. Forwards that are not part of
training, those of planning and of trials, put it back.

    STEPS = 0                              a global that code assigns
    MASKS = {}                             containers and objects in globals, closures, defaults and classes
    class Model: calls = 0                 attributes of the modules' classes, and of classes that the code names
    def counted(): counted.calls += 1      attributes of functions
    @functools.lru_cache                   results of functions, if they hold tensors or containers

It is found by following code: from the forwards of the modules to the functions that their code names, and so on, within the
packages that have modules of the model: the state of a logger, of which threads take care, is left alone. So is what a first
forward makes once for the process, in place of None: a compiled function, a library of operators. Not covered: iterators
(``next(COUNTER)``), attributes in ``__slots__``, arrays, large tensors, and what C++ code keeps.
"""

from __future__ import annotations

import functools
import gc
import opcode
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.callables import ABSENT, content, defaults, is_of_no_model, parts
from meshwright.private import without_any_mode

_DEPTH = 4  # levels of containers and objects within each other
_MOST_ITEMS = 1024  # items of a container that is put back
_MOST_BYTES = 1 << 20  # of a tensor that is put back
_CONTAINERS = frozenset((list, set, deque, dict, OrderedDict, defaultdict, Counter))  # whose subclasses may do anything
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_LEFT_ALONE = (*_CONSTANTS, types.ModuleType)
_DATA = (Tensor, tuple, torch.dtype, torch.device)
_Cached: Any = type(functools.lru_cache(len))
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, _Cached)
_IMPLICIT = "forward __init__ __call__ __getattr__ __getitem__ __iter__ __next__ __enter__ __exit__".split()
_ASSIGNS_GLOBAL = frozenset(opcode.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
_OF_TORCH = frozenset(vars(nn.Module()))

Restore = Callable[[], None]


@contextmanager
def code_state_kept(code: nn.Module | Callable[..., Any]) -> Iterator[None]:
    """At its end, the state is as it was at its beginning. ``code``: a model, or a function that makes one."""
    state = CodeState(code)
    try:
        yield
    finally:
        state.put_back()


class CodeState:
    """The state at the time when this is created. ``code``: as of ``code_state_kept``."""

    def __init__(self, code: nn.Module | Callable[..., Any]) -> None:
        with without_any_mode():
            self._restores = _Search(code).restores

    def put_back(self) -> None:
        """Puts the state back."""
        with without_any_mode():
            for restore in self._restores:
                restore()


class _Search:
    """Follows the code of a model, or of a function that makes one.

    Attributes:
        restores: functions, each of which puts back a part of the state.
    """

    def __init__(self, code: nn.Module | Callable[..., Any]) -> None:
        self.restores: list[Restore] = []
        self._seen: dict[int, Any] = {}  # id → the object, which is kept so that its id is not used again
        self._names = set(_IMPLICIT)  # in the code that was followed
        self._waiting: deque[types.FunctionType] = deque()  # to be followed
        self._unnamed: dict[str, list[Any]] = {}  # attributes of classes by name, which are added if code names them
        self._classes: list[type] = []
        self._of_script: set[int] = set()  # ids of functions whose closures are left alone
        self._packages: set[str] = set()  # that have modules of the model, or the function that makes it
        if isinstance(code, nn.Module):
            self._add_model(code)
        else:
            self._add_builder(code)
        while self._waiting:
            self._follow(self._waiting.popleft())
        self.restores += [_class(kind, self._names) for kind in self._classes]

    def _add_builder(self, build: Callable[..., Any]) -> None:
        """Adds the code of a function that makes a model. What it is closed over, or a method of, is the script's own."""
        for value in (build, *getattr(build, "__dict__", {}).values()):  # (an object of ours may hold the function)
            for part in _made_of(value):
                self._packages |= _package(getattr(part, "__module__", None) or "")
                if isinstance(part, types.FunctionType):
                    self._of_script.add(id(part))
                self._add_code(part)

    def _add_model(self, model: nn.Module) -> None:
        """Adds the code of modules. What their attributes hold is the state of modules, which others put back."""
        modules = [module for module in model.modules() if id(module) not in self._seen]
        self._seen.update((id(module), module) for module in modules)
        for kind in {type(module): None for module in modules}:
            self._packages |= _package(kind.__module__)
        for module in modules:
            self._add_class(type(module))
            for name, value in vars(module).items():
                if name not in _OF_TORCH:
                    self._add_code(value)

    def _add_code(self, value: Any) -> None:
        """Adds a function, or the class of an object. The object itself is left alone."""
        if isinstance(value, (types.MethodType, functools.partial)):
            for part in parts(value) or ():
                self._add_code(part)
        elif isinstance(value, (types.FunctionType, _Cached, type, nn.Module)):
            self._add(value, _DEPTH)
        elif hasattr(value, "__dict__"):
            self._add_class(type(value))

    def _follow(self, function: types.FunctionType) -> None:
        """Adds what the code of a function names, and what the function is closed over."""
        space = function.__globals__
        for names, assigns in _names_in(function.__code__):
            for name in names:
                if name not in self._names:
                    self._names.add(name)
                    for attribute in self._unnamed.pop(name, ()):
                        self._add(attribute, _DEPTH)
                value = space.get(name, ABSENT)
                if assigns:
                    self.restores.append(_item(space, name, value))
                if isinstance(value, types.ModuleType) and self._is_of_model(value.__name__):
                    self._add_python_module(vars(value), names)
                self._add(value, _DEPTH)
        for cell in function.__closure__ or ():
            value = content(cell)
            self.restores.append(_cell(cell, value))
            if id(function) in self._of_script:
                self._add_code(value)
            else:
                self._add(value, _DEPTH)
        for value in defaults(function):
            self._add(value, _DEPTH)

    def _add_python_module(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Adds the attributes of a Python module that code may mean, which names the module and ``names``."""
        for name in names:
            if name in space and not name.startswith("__"):
                self.restores.append(_item(space, name, space[name]))
                self._add(space[name], _DEPTH)

    def _add_class(self, kind: type) -> None:
        """Adds a class and its bases: those attributes that code names."""
        if issubclass(kind, nn.Module):
            self._packages |= _package(kind.__module__)
        for base in kind.__mro__:
            if id(base) in self._seen or not self._is_of_model(base.__module__):
                continue
            self._seen[id(base)] = base
            self._classes.append(base)
            for name, value in vars(base).items():
                if name in self._names:
                    self._add(value, _DEPTH)
                else:
                    self._unnamed.setdefault(name, []).append(value)

    def _add(self, value: Any, depth: int) -> None:
        """Adds a value that code may reach: code is followed, the items of containers and objects are put back."""
        if id(value) in self._seen or isinstance(value, _LEFT_ALONE) or value is ABSENT:
            return
        if isinstance(value, type):
            self._add_class(value)
            return
        if isinstance(value, nn.Module):
            self._add_model(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.restores += _tensor(value)
        elif isinstance(value, types.FunctionType):
            if self._is_of_model(value.__module__ or ""):
                self._waiting.append(value)
                self.restores.append(_container(vars(value)))
                self._add(getattr(value, "__wrapped__", None), depth)
        elif isinstance(value, _Cached):
            self.restores.append(_cache(value))
            self._add(value.__wrapped__, depth)
            for result in _results(value):
                self._add(result, depth)
        elif (within := parts(value)) is not None:
            for part in within:
                self._add(part, depth)
        elif depth:
            self._add_holder(value, depth - 1)

    def _is_of_model(self, name: str) -> bool:
        """Whether a Python module is in a package of the model."""
        return name.partition(".")[0] in self._packages

    def _add_holder(self, value: Any, depth: int) -> None:
        """Adds a container or a plain object, and what it holds."""
        if isinstance(value, tuple):
            items: list[Any] = list(iter(value))  # ``list(value)`` would ask a class of the model for its length
        elif type(value) in _CONTAINERS:
            items = list(value.values() if isinstance(value, dict) else value)
            holder: Any = value
        elif self._is_of_model(type(value).__module__) and hasattr(value, "__dict__"):
            self._add_class(type(value))
            holder = vars(value)
            items = list(holder.values())
        else:
            return
        if len(items) > _MOST_ITEMS:
            return
        if not isinstance(value, tuple):
            self.restores.append(_container(holder))
        for item in items:
            self._add(item, depth)


def _made_of(value: Any) -> Iterator[Any]:
    """The functions and values of which a callable object is made, those within partial functions too; or the value itself."""
    within = parts(value)
    if within is None:
        yield value
    for part in within or ():
        yield from _made_of(part)


@functools.cache
def _names_in(code: types.CodeType) -> list[tuple[tuple[str, ...], bool]]:
    """For a function's code and that of the functions that it makes: (the names in it, whether it assigns globals)."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = code.co_names, not _ASSIGNS_GLOBAL.isdisjoint(code.co_code[::2])
    return [own, *(names for function in inner for names in _names_in(function))]


def _package(name: str) -> set[str]:
    """The package of a Python module; none for a part of torch, NumPy, this library or the standard library."""
    return set() if is_of_no_model(name) else {name.partition(".")[0]} - {""}


# --- what puts back a part of the state -----------------------------------------------------------------------------------


def _item(space: dict[str, Any], name: str, before: Any) -> Restore:
    """Puts back a name of a namespace. ``before``: ABSENT for none."""

    def restore() -> None:
        now = space.get(name, ABSENT)
        _put_back(before, now, partial(space.__setitem__, name), partial(space.__delitem__, name))

    return restore


def _class(kind: type, names: Container[str]) -> Restore:
    """Puts back those attributes of a class that have one of ``names``."""

    def values() -> dict[str, Any]:
        return {k: v for k, v in vars(kind).items() if k in names and not isinstance(v, _FUNCTIONS)}

    before = values()

    def restore() -> None:
        for name in {**before, **values()}:
            now = vars(kind).get(name, ABSENT)
            setting, deleting = partial(type.__setattr__, kind, name), partial(type.__delattr__, kind, name)
            _put_back(before.get(name, ABSENT), now, setting, deleting)

    return restore


def _cell(cell: types.CellType, before: Any) -> Restore:
    """Puts back a variable over which a function is closed."""

    def restore() -> None:
        _put_back(
            before, content(cell), partial(setattr, cell, "cell_contents"), partial(delattr, cell, "cell_contents")
        )

    return restore


def _put_back(before: Any, now: Any, setting: Callable[[Any], None], deleting: Callable[[], None]) -> None:
    """Gives a variable the value that it had, unless a forward has made what it holds once for the process."""
    if now is before or _is_made_once(before, now):
        return
    if before is ABSENT:
        deleting()
    else:
        setting(before)


def _is_made_once(before: Any, now: Any) -> bool:
    """Whether a forward has made something for the process that is no data: a function, an object of torch's or Python's."""
    if (before is not None and before is not ABSENT) or isinstance(now, (*_CONSTANTS, *_DATA)) or now is ABSENT:
        return False
    kind = type(now)
    return kind not in _CONTAINERS and is_of_no_model(kind.__module__) and kind.__module__.partition(".")[0] != "numpy"


def _container(holder: Any) -> Restore:
    """Puts back the items of a list, dict, set or deque."""
    items = holder.copy()

    def restore() -> None:
        if _identities(holder) == _identities(items):
            return
        holder.clear()
        if isinstance(holder, (list, deque)):
            holder.extend(items)
        else:
            holder.update(items)

    return restore


def _identities(holder: Any) -> Any:
    if isinstance(holder, dict):
        return [(key, id(value)) for key, value in holder.items()]
    return list(map(id, holder))


def _tensor(t: Tensor) -> list[Restore]:
    """Puts back the values of a tensor, unless it is large or has none."""
    if t.is_meta or type(t) is not Tensor or t.numel() * t.element_size() > _MOST_BYTES:
        return []
    values = t.detach().clone()

    def restore() -> None:
        if t.shape == values.shape:
            t.data.copy_(values)  # ``data`` leaves the version counter, which autograd checks

    return [restore]


def _cache(function: Any) -> Restore:
    """Empties the cache of a function that has got results which may change or lie on meta. The function gives them again."""
    misses = function.cache_info().misses

    def restore() -> None:
        if function.cache_info().misses != misses and any(_may_change(result) for result in _results(function)):
            function.cache_clear()

    return restore


def _results(function: Any) -> list[Any]:
    """The results in a function's cache, and its keys."""
    kept = [item for item in gc.get_referents(function) if item is not function.__wrapped__]
    return [v for item in kept for v in (item.values() if type(item) is dict else [item])]


def _may_change(result: Any) -> bool:
    if isinstance(result, tuple):
        return any(map(_may_change, result))
    return isinstance(result, Tensor) or type(result) in _CONTAINERS
