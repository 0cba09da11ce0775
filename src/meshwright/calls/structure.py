"""Tensors within whatever a module takes or returns: tuples, dicts, dataclasses, plain objects."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, MutableMapping
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshwright.private import pytree

_DEPTH = 6  # how far into plain objects to look
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (dict, set, frozenset, *_SEQUENCES)
_PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, slice))


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``fn`` of each of its tensors in their places.

    Containers that pytree knows are built anew; plain objects and dataclasses keep their identity and are written to,
    as a model may hold on to them.
    """
    return _map(fn, value, _DEPTH)


def _map(fn: Callable[[Tensor], Any], value: Any, depth: int, around: tuple[int, ...] = ()) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind is tuple or kind is list:  # most calls: these three cost a tenth of what pytree does
        return kind([_map(fn, item, depth, around) for item in value])
    if kind is dict:
        return {key: _map(fn, item, depth, around) for key, item in value.items()}
    return value if kind in _PLAIN else pytree.tree_map(lambda leaf: _mapped(fn, leaf, depth, around), value)


def put_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """As ``map_tensors``, but lists and dicts keep their identity too, and are written to: a module may add to those that it is
    given, and go on with what it returned."""
    kind = type(value)
    if kind is tuple or pytree.is_namedtuple_instance(value):
        items = [put_tensors(fn, item) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else kind(items) if kind is tuple else kind(*items)
    if not isinstance(value, (list, deque, dict)) or kind not in pytree.SUPPORTED_NODES:
        return _map(fn, value, _DEPTH)
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        new = item if type(item) in _PLAIN else put_tensors(fn, item)
        if new is not item:
            value[key] = new
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor within ``value``, in the order in which ``map_tensors`` meets them."""
    leaves: list[tuple[Any, bool]] = []
    _look(value, leaves, _may_hold)
    return [leaf for leaf, _ in leaves if isinstance(leaf, Tensor)]


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or containers of these alone."""
    if isinstance(value, dict):
        return all(map(is_constant, value.values()))
    return type(value) in _PLAIN or (isinstance(value, (set, *_SEQUENCES)) and all(map(is_constant, value)))


def holds_code(value: Any) -> bool:
    """Whether ``value`` holds something that runs later and keeps what it will run with: a closure, a bound method, a partial,
    a generator. Which tensors it will take is not known."""
    leaves: list[tuple[Any, bool]] = []
    _look(value, leaves, lambda item: True)
    return any(_is_code(leaf, of_object) for leaf, of_object in leaves)


def _is_code(leaf: Any, of_object: bool) -> bool:
    if isinstance(leaf, FunctionType):
        return bool(leaf.__closure__ or leaf.__defaults__ or leaf.__kwdefaults__)
    if isinstance(leaf, BuiltinMethodType):
        return isinstance(leaf.__self__, Tensor)
    if isinstance(leaf, (MethodType, functools.partial, Iterator)):
        return True
    # What is called, of the tensors that it holds, where tensors_of passes it over.
    return of_object and callable(leaf) and _is_object(leaf) and bool(tensors_of(leaf))


def _look(
    value: Any,
    leaves: list[tuple[Any, bool]],
    looked_at: Callable[[Any], bool],
    depth: int = _DEPTH,
    around: tuple[int, ...] = (),
) -> None:
    """Lists what stands in containers, and in plain objects within these, an object before its attributes.

    Args:
        leaves: gets (it, whether it is an attribute of an object).
        looked_at: an attribute of an object → whether it is one of them.
        depth: how many objects to look into, one within the other.
        around: ids of those that ``value`` is within, which may be in a circle.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        leaves.append((value, bool(around)))
    elif kind is tuple or kind is list:  # most calls: these three cost a tenth of what pytree does
        for item in value:
            if type(item) not in _PLAIN:
                _look(item, leaves, looked_at, depth, around)
    elif kind is dict:
        for item in value.values():
            if type(item) not in _PLAIN:
                _look(item, leaves, looked_at, depth, around)
    elif kind not in _PLAIN:
        for leaf in pytree.tree_leaves(value):
            leaves.append((leaf, bool(around)))
            if depth and not isinstance(leaf, Tensor) and _is_object(leaf) and id(leaf) not in around:
                for item in list(vars(leaf).values()):
                    if looked_at(item):
                        _look(item, leaves, looked_at, depth - 1, (*around, id(leaf)))


def as_it_is(value: Any, kept: Container[int]) -> Any:
    """``value`` in containers and plain objects of its own, as a model may go on to write to what a module returned; its
    tensors are the very ones.

    ``kept``: ids of what stays the very thing, too.
    """

    def copy_of(item: Any, depth: int) -> Any:
        plain = isinstance(item, (Tensor, nn.Module, type)) or callable(item) or not hasattr(item, "__dict__")
        if id(item) in kept or plain or not depth:
            return item
        try:
            made = copy.copy(item)
            for key, inner in list(vars(made).items()):
                if _may_hold(inner):
                    object.__setattr__(made, key, within(inner, depth - 1))
        except Exception:  # whatever an object may say to being copied
            return item
        return made

    def within(item: Any, depth: int) -> Any:
        return pytree.tree_map(lambda leaf: copy_of(leaf, depth), item, is_leaf=lambda x: id(x) in kept)

    return within(value, _DEPTH)


def snapshot(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """``value`` in containers and plain objects of its own, with ``fn`` of each tensor: what it is now, whatever a model then
    writes to it. An object that stands at several places is one in the snapshot, too."""
    return _snapshot(value, fn, {}, _DEPTH)


# No functions within ``snapshot``: ones that call each other would hold the copies until Python collects garbage.


def _snapshot(item: Any, fn: Callable[[Tensor], Tensor], made: dict[int, Any], depth: int) -> Any:
    return pytree.tree_map(lambda leaf: _copied(leaf, fn, made, depth), item)


def _copied(leaf: Any, fn: Callable[[Tensor], Tensor], made: dict[int, Any], depth: int) -> Any:
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if not depth or not is_plain_object(leaf):
        return leaf
    if id(leaf) not in made:
        try:
            made[id(leaf)] = new = copy.copy(leaf)
        except Exception:  # whatever an object may say to being copied
            return leaf
        attributes = attributes_in(new)
        for key, inner in list(attributes.items()):
            if type(inner) not in _PLAIN:
                attributes[key] = _snapshot(inner, fn, made, depth - 1)
    return made[id(leaf)]


def lists_in(value: Any) -> list[list[Any]]:
    """Every list within tuples, lists and dicts, and in plain objects within those, in a fixed order."""
    lists: list[list[Any]] = []

    def look(item: Any, depth: int) -> None:
        if isinstance(item, list):
            lists.append(item)
        if depth and isinstance(item, (list, tuple)):
            inner = list(item)
        elif depth and isinstance(item, dict):
            inner = list(item.values())
        elif depth and not isinstance(item, Tensor) and _may_hold(item) and hasattr(item, "__dict__"):
            inner = list(vars(item).values())
        else:
            return
        for part in inner:
            look(part, depth - 1)

    look(value, _DEPTH)
    return lists


def is_scripted(module: nn.Module) -> bool:
    """Whether torch.jit made a module: what it keeps is no attribute in Python, and no forward leaves a value of ours on it."""
    return isinstance(module, torch.jit.ScriptModule)


def buffers_in(module: nn.Module) -> MutableMapping[str, Any]:
    """A module's buffers, those that are None too, which can be set there.

    There is no public way to see or to put back one that is None.
    """
    return _ScriptedBuffers(module) if is_scripted(module) else module._buffers


class _ScriptedBuffers(MutableMapping[str, Any]):
    """The buffers of a module that torch.jit made, whose own table cannot be gone through. None is added or goes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = [name for name, _ in module.named_buffers(recurse=False)]

    def __getitem__(self, key: str) -> Any:
        if key not in self._names:
            raise KeyError(key)
        return getattr(self._module, key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._module, key, value)

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError(f"{key}: torch.jit lets no buffer go")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- plain objects that modules hold ------------------------------------------------------------------------------------


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class that comes with the model, and may be its state: no module, no tensor; nothing of
    torch, of ours or of Python's own, a logger or a lock say."""
    return (
        type(value) not in _PLAIN
        and not isinstance(value, (Tensor, nn.Module, type, *_CONTAINERS))
        and _seen_of(value).of_the_model
    )


class _Kind(NamedTuple):
    """What is asked of a class."""

    of_the_model: bool  # and its objects have attributes
    slots: frozenset[str]  # the attributes that they have by ``__slots__``


_KINDS = WeakKeyDictionary[type, _Kind]()  # of what has been seen, as this is asked of each attribute of each module


def _seen_of(value: Any) -> _Kind:
    kind = type(value)
    if (seen := _KINDS.get(kind)) is None:
        members = (item for base in kind.__mro__ for item in vars(base).items())
        slots = frozenset(n for n, m in members if isinstance(m, MemberDescriptorType) and n != "__dict__")
        package = str(kind.__module__).partition(".")[0]
        of_the_model = package not in ("torch", "meshwright") and (
            package == "types" or package not in sys.stdlib_module_names
        )
        seen = _KINDS[kind] = _Kind(of_the_model and (bool(slots) or kind.__dictoffset__ != 0), slots)
    return seen


def attributes_in(value: Any) -> MutableMapping[str, Any]:
    """The attributes of an object, which can be set and deleted there; no property and no method of its own is called."""
    slots = _seen_of(value).slots
    return _Attributes(value, slots) if slots else vars(value)


class _Attributes(MutableMapping[str, Any]):
    """Attributes of an object of which some are in ``__slots__``."""

    def __init__(self, of: Any, slots: frozenset[str]) -> None:
        self._of, self._slots = of, slots
        self._others: dict[str, Any] = getattr(of, "__dict__", {})

    def __getitem__(self, key: str) -> Any:
        if key not in self._slots:
            return self._others[key]
        try:
            return object.__getattribute__(self._of, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._slots:
            object.__setattr__(self._of, key, value)
        else:
            self._others[key] = value

    def __delitem__(self, key: str) -> None:
        if key in self._slots:
            object.__delattr__(self._of, key)
        else:
            del self._others[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*(key for key in sorted(self._slots) if key in self), *self._others])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return hasattr(self._of, str(key)) if key in self._slots else key in self._others


def plain_objects(name: str, value: Any, seen: set[int], depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Every plain object within an attribute's value, in containers and objects too, each once: (its name from that of the
    attribute on, the object).

    Args:
        seen: ids of what has been looked into; gets those that are.
    """
    if type(value) in _PLAIN or not depth or id(value) in seen:
        return
    if is_plain_object(value):
        yield name, value
        parts: list[tuple[Any, Any]] = list(attributes_in(value).items())
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, _SEQUENCES):
        parts = list(enumerate(value))
    else:
        return
    seen.add(id(value))
    for key, part in parts:
        if type(part) not in _PLAIN:
            yield from plain_objects(f"{name}.{key}", part, seen, depth - 1)


def owner_of(module: nn.Module, name: str) -> tuple[Any, str] | None:
    """What has an attribute of a module, or one of a plain object within it (``stats.mean``): the module or the object, and its
    own attribute's name. None if the object is no longer there."""
    if "." not in name or name in vars(module):
        return module, name
    for key, value in list(vars(module).items()):
        if name.startswith(f"{key}."):
            for inner, owner in plain_objects(key, value, set()):
                attribute = name[len(inner) + 1 :]
                if name.startswith(f"{inner}.") and "." not in attribute:
                    return owner, attribute
    return None


def _mapped(fn: Callable[[Tensor], Any], leaf: Any, depth: int, around: tuple[int, ...]) -> Any:
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if depth and _is_object(leaf) and id(leaf) not in around:
        for key, item in list(vars(leaf).items()):
            new = _map(fn, item, depth - 1, (*around, id(leaf))) if _may_hold(item) else item
            if any(a is not b for a, b in zip(pytree.tree_leaves(new), pytree.tree_leaves(item), strict=True)):
                object.__setattr__(leaf, key, new)
    return leaf


def _is_object(leaf: Any) -> bool:
    return type(leaf).__dictoffset__ != 0 and not isinstance(leaf, (nn.Module, type, FunctionType))


def _may_hold(item: Any) -> bool:
    plain = (str, bytes, int, float, complex, bool, type(None), nn.Module, type)
    return not isinstance(item, plain) and not callable(item)
