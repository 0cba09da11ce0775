"""Tensors within the arguments and results of modules: in tuples, dicts, dataclasses and plain objects."""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from operator import is_not
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshwright.private import pytree, storage_of

_DEPTH = 6  # how many plain objects to look into, one within the other
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (dict, set, frozenset, *_SEQUENCES)
# Types of values that hold no tensors and never change.
PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, slice))


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with each of its tensors t replaced by ``fn(t)``.

    Containers that pytree knows are new objects. Plain objects and dataclasses stay the same objects and are written to, as a
    model may hold references to them.
    """
    return _map(fn, value, _DEPTH)


def _map(fn: Callable[[Tensor], Any], value: Any, depth: int, around: tuple[int, ...] = ()) -> Any:
    """``map_tensors``, looking into ``depth`` more objects. ``around``: ids of the objects that contain ``value``."""
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind is tuple or kind is list:  # most calls: these three branches take a tenth of pytree's time
        return kind([_map(fn, item, depth, around) for item in value])
    if kind is dict:
        return {key: _map(fn, item, depth, around) for key, item in value.items()}
    return value if kind in PLAIN else pytree.tree_map(lambda leaf: _mapped(fn, leaf, depth, around), value)


def put_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``map_tensors``, but lists and dicts stay the same objects too, and are written to: a module may append to a list among
    its arguments, or go on with the list that it returned."""
    kind = type(value)
    if kind is tuple or pytree.is_namedtuple_instance(value):
        items = [put_tensors(fn, item) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else kind(items) if kind is tuple else kind(*items)
    if not isinstance(value, (list, deque, dict)) or kind not in pytree.SUPPORTED_NODES:
        return _map(fn, value, _DEPTH)
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        new = item if type(item) in PLAIN else put_tensors(fn, item)
        if new is not item:
            value[key] = new
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor within ``value``, in the order of ``map_tensors``."""
    leaves: list[tuple[Any, bool]] = []
    _look(value, leaves, _may_hold)
    return [leaf for leaf, _ in leaves if isinstance(leaf, Tensor)]


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a string or the like, or a container of nothing else."""
    if isinstance(value, dict):
        return all(map(is_constant, value.values()))
    return type(value) in PLAIN or (isinstance(value, (set, *_SEQUENCES)) and all(map(is_constant, value)))


def holds_code(value: Any) -> bool:
    """Whether ``value`` holds code that may run later with tensors that it keeps: a closure, a bound method, a partial, a
    generator. It is unknown which tensors such code will use."""
    leaves: list[tuple[Any, bool]] = []
    _look(value, leaves, lambda item: True)
    return any(_is_code(leaf, of_object) for leaf, of_object in leaves)


def _is_code(leaf: Any, of_object: bool) -> bool:
    """Whether a leaf is code that keeps tensors. ``of_object``: whether it is an attribute of an object."""
    if isinstance(leaf, FunctionType):
        return bool(leaf.__closure__ or leaf.__defaults__ or leaf.__kwdefaults__)
    if isinstance(leaf, BuiltinMethodType):
        return isinstance(leaf.__self__, Tensor)
    if isinstance(leaf, (MethodType, functools.partial, Iterator)):
        return True
    # A callable object with tensors, as an attribute of an object: ``tensors_of`` skips it.
    return of_object and callable(leaf) and _is_object(leaf) and bool(tensors_of(leaf))


def _look(
    value: Any,
    leaves: list[tuple[Any, bool]],
    looked_at: Callable[[Any], bool],
    depth: int = _DEPTH,
    around: tuple[int, ...] = (),
) -> None:
    """Lists the items of containers, and of plain objects within them, an object before its attributes.

    Args:
        leaves: gets (item, whether it is within an object).
        looked_at: an attribute of an object → whether to look at it.
        depth: how many objects to look into, one within the other.
        around: ids of the objects that ``value`` is within, as objects may hold each other.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        leaves.append((value, bool(around)))
    elif kind is tuple or kind is list:  # most calls: these branches take a tenth of pytree's time
        for item in value:
            if type(item) not in PLAIN:
                _look(item, leaves, looked_at, depth, around)
    elif kind is dict:
        for item in value.values():
            if type(item) not in PLAIN:
                _look(item, leaves, looked_at, depth, around)
    elif kind not in PLAIN:
        for leaf in pytree.tree_leaves(value):
            leaves.append((leaf, bool(around)))
            if depth and not isinstance(leaf, Tensor) and _is_object(leaf) and id(leaf) not in around:
                for item in list(vars(leaf).values()):
                    if looked_at(item):
                        _look(item, leaves, looked_at, depth - 1, (*around, id(leaf)))


def copied_structure(value: Any, shared: Container[int]) -> Any:
    """A copy of ``value`` with new containers and plain objects, as a model may write to what a module returned. Its tensors
    are the same objects.

    ``shared``: ids of other objects that are not copied.
    """

    def copy_of(item: Any, depth: int) -> Any:
        uncopied = isinstance(item, (Tensor, nn.Module, type)) or callable(item) or not hasattr(item, "__dict__")
        if id(item) in shared or uncopied or not depth:
            return item
        try:
            result = copy.copy(item)
            for key, inner in list(vars(result).items()):
                if _may_hold(inner):
                    object.__setattr__(result, key, within(inner, depth - 1))
        except Exception:  # an object may raise anything if it is copied
            return item
        return result

    def within(item: Any, depth: int) -> Any:
        return pytree.tree_map(lambda leaf: copy_of(leaf, depth), item, is_leaf=lambda x: id(x) in shared)

    return within(value, _DEPTH)


def snapshot(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A copy of ``value`` with new containers and plain objects, and with ``fn(t)`` for each tensor t. A later write to
    ``value`` does not change it. An object that occurs at several places is one object in the copy, too."""
    return _snapshot(value, fn, {}, _DEPTH)


# No nested functions: two that call each other would hold the copies until Python collects garbage.


def _snapshot(item: Any, fn: Callable[[Tensor], Tensor], copies: dict[int, Any], depth: int) -> Any:
    kind = type(item)
    if kind in PLAIN:
        return item
    if kind is tuple or kind is list:  # most containers: pytree takes ten times as long
        return kind([_snapshot(part, fn, copies, depth) for part in item])
    if kind is dict:
        return {key: _snapshot(part, fn, copies, depth) for key, part in item.items()}
    if kind in pytree.SUPPORTED_NODES:
        return pytree.tree_map(lambda leaf: _copied(leaf, fn, copies, depth), item)
    return _copied(item, fn, copies, depth)


def _copied(leaf: Any, fn: Callable[[Tensor], Tensor], copies: dict[int, Any], depth: int) -> Any:
    """The copy of a leaf for ``snapshot``. ``copies``: id → copy, of the objects copied so far."""
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if not depth or not is_plain_object(leaf):
        return leaf
    if id(leaf) not in copies:
        try:
            copies[id(leaf)] = new = _shallow_copy(leaf)
        except Exception:  # an object may raise anything if it is copied
            return leaf
        attributes = attributes_in(new)
        for key, inner in list(attributes.items()):
            if type(inner) not in PLAIN:
                attributes[key] = _snapshot(inner, fn, copies, depth - 1)
    return copies[id(leaf)]


def _shallow_copy(value: Any) -> Any:
    """``copy.copy`` of a plain object. Most classes leave it to Python how they are copied, and need not be asked: a snapshot
    of a cache copies an object for each layer, and with ``copy.copy`` takes 1.4 times as long."""
    if not is_copied_by_python(value):
        return copy.copy(value)
    new = object.__new__(type(value))
    vars(new).update(vars(value))
    return new


def _clone(t: Tensor) -> Tensor:
    return t.detach().clone()


def copied_together(tensors: Sequence[Tensor], copy: Callable[[Tensor], Tensor] = _clone) -> list[Tensor]:
    """A copy of each of some different tensors. Tensors of one dtype that share memory share memory in the copies too.

    ``copy``: copies a tensor, or the memory of several; perhaps in another dtype.
    """
    sharing: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        plain = type(t) is Tensor and t.layout is torch.strided and not t.is_nested and t.numel() > 0
        sharing.setdefault((storage_of(t), t.dtype) if plain else (i,), []).append(i)
    copies: dict[int, Tensor] = {}
    for indices in sharing.values():
        alone = len(indices) == 1
        of_memory = [copy(tensors[indices[0]])] if alone else _views_of_a_copy([tensors[i] for i in indices], copy)
        copies.update(zip(indices, of_memory, strict=True))
    return [copies[i] for i in range(len(tensors))]


def _views_of_a_copy(sharing: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Copies of tensors that share memory, which share memory too."""
    first = min(t.storage_offset() for t in sharing)
    extents = (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in sharing)
    last = max(t.storage_offset() + extent for t, extent in zip(sharing, extents, strict=True))
    memory = copy(sharing[0].detach().as_strided((last - first + 1,), (1,), first))
    return [memory.as_strided(t.shape, t.stride(), t.storage_offset() - first) for t in sharing]


def is_scripted(module: nn.Module) -> bool:
    """Whether torch.jit made a module. Its state is not in Python attributes, and no forward leaves a value of ours on it."""
    return isinstance(module, torch.jit.ScriptModule)


def buffers_in(module: nn.Module) -> MutableMapping[str, Any]:
    """A module's table of buffers, which can be written. It includes buffers that are None, for which there is no public
    interface."""
    return _ScriptedBuffers(module) if is_scripted(module) else module._buffers


class _ScriptedBuffers(MutableMapping[str, Any]):
    """The buffers of a module that torch.jit made, whose own table cannot be iterated. No buffer is added or deleted."""

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
        raise NotImplementedError(f"{key}: torch.jit cannot delete a buffer")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- plain objects that modules hold ------------------------------------------------------------------------------------


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class of the model's, and so may be part of its state. Not a module, not a tensor, and
    not an object of torch, of this package or of Python's library (a logger, a lock)."""
    return (
        type(value) not in PLAIN
        and not isinstance(value, (Tensor, nn.Module, type, *_CONTAINERS))
        and _kind_of(value).of_the_model
    )


class _Kind(NamedTuple):
    """Facts of a class."""

    of_the_model: bool  # whether it is a class of the model's whose objects have attributes
    slots: frozenset[str]  # the attributes in ``__slots__``
    copied_by_python: (
        bool  # whether ``copy.copy`` makes an empty object, and gives it the attributes; no method is called
    )


class _Empty:
    """A class whose objects have attributes, and nothing else."""


# What decides how ``copy.copy`` copies an object. ``__setstate__`` and the others that ``object`` lacks must be missing.
_OF_COPYING = (
    "__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattribute__",
    "__copy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__getattr__",
)  # fmt: skip


def _copied_by_python(cls: type) -> bool:
    """Whether a class, which has no slots, leaves it to Python how its objects are copied. A class of the size of an empty one
    keeps nothing beside its attributes, as a type of C might."""
    own = all(getattr(cls, name, None) is getattr(object, name, None) for name in _OF_COPYING)
    return own and cls.__basicsize__ == _Empty.__basicsize__ and cls not in copyreg.dispatch_table


_KNOWN_KINDS = WeakKeyDictionary[type, _Kind]()  # a cache: every attribute of every module is asked for


def _kind_of(value: Any) -> _Kind:
    """The facts of a value's class, from the cache."""
    cls = type(value)
    if (kind := _KNOWN_KINDS.get(cls)) is None:
        members = (item for base in cls.__mro__ for item in vars(base).items())
        slots = frozenset(n for n, m in members if isinstance(m, MemberDescriptorType) and n != "__dict__")
        package = str(cls.__module__).partition(".")[0]
        of_the_model = package not in ("torch", "meshwright") and (
            package == "types" or package not in sys.stdlib_module_names
        )
        has_attributes = bool(slots) or cls.__dictoffset__ != 0
        copied_by_python = not slots and _copied_by_python(cls)
        kind = _KNOWN_KINDS[cls] = _Kind(of_the_model and has_attributes, slots, copied_by_python)
    return kind


def is_copied_by_python(value: Any) -> bool:
    """Whether ``copy.copy`` of a plain object makes an empty one and gives it the attributes, and calls no method."""
    return _kind_of(value).copied_by_python


def attributes_in(value: Any) -> MutableMapping[str, Any]:
    """The attributes of an object as a mapping that can be written. No property and no method of the object is called."""
    slots = _kind_of(value).slots
    return _Attributes(value, slots) if slots else vars(value)


class _Attributes(MutableMapping[str, Any]):
    """The attributes of an object some of which are in ``__slots__``."""

    def __init__(self, owner: Any, slots: frozenset[str]) -> None:
        self._owner, self._slots = owner, slots
        self._others: dict[str, Any] = getattr(owner, "__dict__", {})

    def __getitem__(self, key: str) -> Any:
        if key not in self._slots:
            return self._others[key]
        try:
            return object.__getattribute__(self._owner, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._slots:
            object.__setattr__(self._owner, key, value)
        else:
            self._others[key] = value

    def __delitem__(self, key: str) -> None:
        if key in self._slots:
            object.__delattr__(self._owner, key)
        else:
            del self._others[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*(key for key in sorted(self._slots) if key in self), *self._others])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return hasattr(self._owner, str(key)) if key in self._slots else key in self._others


def plain_objects(name: str, value: Any, seen: set[int], depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """(dotted name, object) for each plain object within an attribute's value, in containers and objects too, each once.

    Args:
        name: the name of the attribute, with which the dotted names begin.
        seen: ids of the objects that have been looked into; they are added.
    """
    if type(value) in PLAIN or not depth or id(value) in seen:
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
        if type(part) not in PLAIN:
            yield from plain_objects(f"{name}.{key}", part, seen, depth - 1)


def owner_of(module: nn.Module, name: str) -> tuple[Any, str] | None:
    """(owner, attribute) for an attribute of a module, or of a plain object within it: for ``stats.mean`` (the object at
    ``stats``, "mean"). None if the object does not exist any more."""
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
    """``_map`` for a leaf of pytree: a tensor, a plain object, or anything else."""
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if depth and _is_object(leaf) and id(leaf) not in around:
        for key, item in list(vars(leaf).items()):
            new = _map(fn, item, depth - 1, (*around, id(leaf))) if _may_hold(item) else item
            if new is not item and any(map(is_not, pytree.tree_leaves(new), pytree.tree_leaves(item))):
                object.__setattr__(leaf, key, new)
    return leaf


def _is_object(leaf: Any) -> bool:
    return type(leaf).__dictoffset__ != 0 and not isinstance(leaf, (nn.Module, type, FunctionType, ModuleType))


def _may_hold(item: Any) -> bool:
    plain = (str, bytes, int, float, complex, bool, type(None), nn.Module, type)
    return not isinstance(item, plain) and not callable(item)


def buffer_places(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The name of each buffer, also of those that are None until a forward makes them → (the number of its module, its number
    in the module): the order of ``named_buffers``."""
    return {
        f"{prefix}.{key}" if prefix else key: (number, i)
        for number, (prefix, module) in enumerate(model.named_modules())
        for i, key in enumerate(buffers_in(module))
    }
