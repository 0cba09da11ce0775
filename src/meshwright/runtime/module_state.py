"""``ModuleState``: the state that a forward may change on its modules: buffers, forward hooks, and attributes that are tensors,
numbers or containers of these.

Parameters, submodules and other hooks are not part of it: they belong to the optimizer, to the layout and to FSDP2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.calls.placeholder import Placeholder
from meshwright.calls.structure import (
    PLAIN,
    attributes_in,
    buffers_in,
    copied_together,
    is_plain_object,
    is_scripted,
)
from meshwright.private import modules_of, set_version, storage_of, version, without_modes
from meshwright.runtime.weights.local_part import set_memory
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.dispatcher import full_tensor
from meshwright.spmd.tensor import GlobalTensor

_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
# tables of hooks: a model may register some in its first forward, and note that it has
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# How many containers and plain objects deep tensors are looked for. Caches are about two deep (layers → keys and values);
# without an end, an object that refers to half the program would be copied whole before each step.
_DEPTH = 4
_MAPPINGS = (dict, MutableMapping)  # a dict first: ``MutableMapping`` alone takes five times as long to test for
_Holder = MutableMapping[Any, Any] | list[Any] | set[Any] | deque[Any]  # what state is stored in, and written back to


class Contents:
    """The containers with state of a module and of its submodules, and the items in each: a snapshot without the values of
    tensors.

    Finding the containers takes most of the time of a snapshot. The next snapshot may use the same ``Contents``, if nothing has
    been replaced, added or removed (``is_current``).

    Attributes:
        items: (container, its items).
        tensors: for each container, the tensors in it that are state.
        may_be_kept: whether the items may be kept for longer than the graph of a forward.
    """

    def __init__(self, module: nn.Module) -> None:
        found = list(_owned_holders(module))
        self.items = [(holder, content_of(holder)) for _, holder in found]
        self.tensors = [[t for value in _values(holder) for t in _state_tensors(value)] for _, holder in found]
        self._owners = [(owner, holder) for owner, holder in found if owner is not None]
        modules = [owner for owner, _ in self._owners if isinstance(owner, nn.Module)]
        self.may_be_kept = _may_all_be_kept(found, modules)
        # The children of modules are no state, but modules are found through them.
        self._watched: list[Any] = [holder for _, holder in found] + [vars(m)["_modules"] for m in modules]
        self._mappings = [holder for holder in self._watched if isinstance(holder, _MAPPINGS)]
        self._then = self._now()

    def is_current(self) -> bool:
        """Whether all containers still are where they were, with the same objects in them."""
        if not all(getattr(owner, "__dict__", None) is holder for owner, holder in self._owners):
            return False
        lengths, keys, values = self._now()
        lengths_then, keys_then, values_then = self._then
        # (Of each container, as an item may have moved from the end of one list to the begin of the next one.)
        return lengths == lengths_then and all(map(is_, keys, keys_then)) and all(map(is_, values, values_then))

    def _now(self) -> tuple[list[int], list[Any], list[Any]]:
        """(the length of each container, their keys or items, the values of mappings)."""
        lengths, keys = list(map(len, self._watched)), list(chain.from_iterable(self._watched))
        return lengths, keys, list(chain.from_iterable([m.values() for m in self._mappings]))


def _may_all_be_kept(found: list[tuple[Any, _Holder]], modules: list[nn.Module]) -> bool:
    """Whether all items of containers may be kept, and are enough to tell that a new search would find the same containers.

    Args:
        found: (owner, container), for all containers.
        modules: the owners that are modules.
    """
    if not all(isinstance(holder, (dict, list, set, deque)) for _, holder in found):  # one that is made for each look
        return False
    containers, hooks = {id(holder) for _, holder in found}, {id(vars(m)[name]) for m in modules for name in _HOOKS}
    items = [value for _, holder in found if id(holder) not in hooks for value in _values(holder)]
    return all(_may_be_kept(value, containers) for value in items)


def _may_be_kept(value: Any, containers: Container[int]) -> bool:
    """Not a tensor with a graph; nor a container of parameters, which the search passes over, and may not do next time.

    Args:
        containers: ids of those that were found.
    """
    if isinstance(value, Tensor):
        return isinstance(value, nn.Parameter) or (type(value) is Tensor and not value.requires_grad)
    if isinstance(value, tuple):
        return all(_may_be_kept(item, containers) for item in value)
    return not isinstance(value, (dict, list, set, deque)) or id(value) in containers or not holds_parameters(value)


def _state_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of the state in an item: the item, or those in a tuple."""
    if isinstance(value, tuple):
        for item in value:
            yield from _state_tensors(item)
    elif is_state(value):
        yield value


class ModuleStates:
    """Takes snapshots of the state of one module, before each of its forwards."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._contents: Contents | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": self._module, "_contents": None}  # a copy of the module has containers of its own

    def now(self) -> ModuleState:
        contents = self._contents
        if contents is None or not contents.is_current():
            contents = Contents(self._module)
            self._contents = contents if contents.may_be_kept else None
        return ModuleState(self._module, contents=contents)


class ModuleState:
    """A snapshot of the state of a module and of its submodules.

    Tensors are copied, as a forward may write to them in place. Tensors that require a gradient are not: they are referred to.

    Args:
        parameters: parameters that a forward may write to (in a momentum encoder: a moving average of others).
        contents: those of now, if they are known.
    """

    def __init__(
        self, module: nn.Module, parameters: Iterable[nn.Parameter] = (), *, contents: Contents | None = None
    ) -> None:
        self._module = module
        self._parameters = [_Written.of(p) for p in parameters]
        self._contents = Contents(module) if contents is None else contents
        kept = {id(t): t for tensors in self._contents.tensors for t in tensors if not t.requires_grad}
        self._kept = list(kept.values())
        self._copies = _copies(self._kept)
        # For each container, whether there are copied tensors in it.
        self._copied = [any(id(t) in kept for t in tensors) for tensors in self._contents.tensors]

    def now(self) -> ModuleState:
        """A new snapshot of the same module and parameters."""
        return ModuleState(self._module, [p.parameter for p in self._parameters])

    @contextmanager
    def restored(self, cast: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
        """A context in which modules have the state of the snapshot, in new copies of its tensors. Afterwards they have their
        earlier state again.

        ``cast``: gives a copy another dtype.
        """
        contents = self._contents
        unchanged = contents.is_current()
        before = contents.items if unchanged else [(holder, content_of(holder)) for holder, _ in contents.items]
        copies = dict(zip(map(id, self._kept), _copies(self._copies, cast), strict=True))
        written = [_Written.of(p.parameter) for p in self._parameters]
        if copies or not unchanged:
            for (holder, content), copied in zip(contents.items, self._copied, strict=True):
                if copied or not _has_content(holder, content):
                    fill(holder, content, copies)
        for p in self._parameters:
            p.restore()
        try:
            yield
        finally:
            if not (unchanged and contents.is_current()):
                for holder, content in before:
                    if not _has_content(holder, content):
                        fill(holder, content)
            for p in written:
                p.restore()


class AttributeValues:
    """The values of all attributes of a module and of its submodules at one moment, and the items of containers and objects
    in them, by reference.

    A backward that runs parts of a forward again (checkpoints of the model's own) needs what that forward left there, and
    other forwards may have run since.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers = {id(buffers_in(m)) for m in module.modules()}
        tables = {id(table) for table in hook_tables(module)} | buffers
        self._contents = [(h, content) for h, content in Contents(module).items if id(h) not in tables]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the attributes have these values. Afterwards those that had others have them again."""
        replaced = [(holder, replace(holder, content)) for holder, content in self._contents]
        try:
            yield
        finally:
            for holder, items in replaced:
                put_back(holder, items)


_MISSING = object()


@dataclass(frozen=True)
class _Written:
    """A snapshot of a parameter that a forward may write to.

    The version counter is restored too. Else autograd would refuse the backward of an earlier forward of the step, which has
    saved the parameter: the restored values are the ones that it saved.

    Attributes:
        local: this rank's local tensor of the parameter; ``value``: a copy of it; ``version``: its version counter.
    """

    parameter: nn.Parameter
    local: Tensor
    value: Tensor
    version: int | None

    @classmethod
    def of(cls, p: nn.Parameter) -> _Written:
        local = local_tensor(p).detach()
        return cls(p, local, local.clone(), version(local))

    def restore(self) -> None:
        """Writes the values back. The parameter stays the same object; if the forward gave it other memory (``p.data =
        ...``), it gets its former memory back."""
        now = local_tensor(self.parameter)
        now_at, was_at = ((storage_of(t), t.storage_offset(), t.dtype) for t in (now, self.local))
        if now_at != was_at:
            set_memory(self.parameter, self.local)
        self.local.data.copy_(self.value)
        set_version(self.local, self.version)


def _copies(tensors: Sequence[Tensor], cast: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Copies of tensors, which share memory as they do. Outside all modes: else a stage would record a copy as an operator of
    the model."""

    def copy(t: Tensor) -> Tensor:
        return _copy(t) if cast is None or type(t) is not Tensor else cast(_copy(t))

    with torch.no_grad(), without_modes():
        return copied_together(tensors, copy)


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, Placeholder):
        return value  # its values are on other ranks
    copy: Tensor = (
        value._mw_dispatcher.call(Tensor.clone, (value,), {})
        if isinstance(value, GlobalTensor)
        else value.detach().clone()
    )
    return copy


class Leftovers:
    """Global tensors that forwards leave on the modules of a model.

    Most modules have only constants and plain buffers. These are searched again only if one of them got, or lost, a value:
    after each step their values are compared with those at the last search.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._holders: list[Mapping[str, Any]] = []  # of plain modules: dicts of attributes and buffers
        self._values_then: list[Any] = []  # the values in these at the last search
        self._children: list[Mapping[str, Any]] = []
        self._children_then: list[Mapping[str, Any]] = []
        self._candidates: list[nn.Module] | None = None

    def gather_tensors(self) -> None:
        """Gathers them (an assigned buffer, a list of statistics) into full tensors on every rank, so that later code finds
        what it finds on one device, also if it runs on one rank alone. Collective over the ranks that ran the forward."""
        if self._candidates is None or not self._is_unchanged():
            self._search()
        seen: set[int] = set()
        for submodule in self._candidates or ():
            for _, holder in _holders_of_module(submodule, seen):
                if any(map(_has_global_tensor, _values(holder))):
                    _gather_tensors(holder)

    def _search(self) -> None:
        """Finds the modules that may have global tensors, and notes the values of the others."""
        modules = list(modules_of(self._model))
        plain = {id(m) for m in modules if _is_plain(m)}
        self._candidates = [m for m in modules if id(m) not in plain]
        others = [m for m in modules if id(m) in plain and not is_scripted(m)]
        self._holders = [holder for m in others for holder in (vars(m), buffers_in(m))]
        self._values_then = _all_values(self._holders)
        self._children = [vars(m)["_modules"] for m in modules if not is_scripted(m)]
        self._children_then = [dict(children) for children in self._children]

    def _is_unchanged(self) -> bool:
        now = _all_values(self._holders)
        same = len(now) == len(self._values_then) and all(map(is_, now, self._values_then))
        return same and self._children == self._children_then


def _all_values(holders: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(holder.values() for holder in holders)]


def _gather_tensors(holder: _Holder) -> None:
    if isinstance(holder, _MAPPINGS):
        internal = _INTERNAL if "_parameters" in holder else ()
        holder.update({k: _full(v) for k, v in holder.items() if k not in internal})
    elif not isinstance(holder, set):  # a set has no global tensors: they are not hashable
        for i, value in enumerate(holder):
            holder[i] = _full(value)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has only constants and plain buffers, as most modules do. A quick check."""
    if is_scripted(module):
        return True
    attributes = vars(module)
    for name in attributes.keys() - _INTERNAL:
        value = attributes[name]
        if type(value) not in PLAIN and not _is_plain_tuple(value):
            return False
    return GlobalTensor not in map(type, vars(module)["_buffers"].values())


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in PLAIN for item in value)


def _has_global_tensor(value: Any) -> bool:
    return isinstance(value, GlobalTensor) or (type(value) is tuple and any(map(_has_global_tensor, value)))


def _full(value: Any) -> Any:
    """A value, with a global tensor gathered. Collective."""
    return tuple(map(_full, value)) if type(value) is tuple else full_tensor(value)


def is_state(value: Any) -> bool:
    """Whether a value is a tensor that belongs to the state: no parameter."""
    return isinstance(value, Tensor) and not isinstance(value, (nn.Parameter, DTensor))


def holds_parameters(value: Any) -> bool:
    """Whether a value is a container of parameters, as recurrent modules have. FSDP2 replaces its items while parameters are
    gathered; a copy of the container would keep the gathered ones alive."""
    return isinstance(value, (dict, list, set, deque)) and any(isinstance(x, nn.Parameter) for x in _values(value))


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of each attribute that ``nn.Module`` does not define."""
    return ((key, value) for key, value in vars(module).items() if key not in _INTERNAL)


def _owned_holders(module: nn.Module) -> Iterator[tuple[Any, _Holder]]:
    """Every container with state of a module and of its submodules: the dicts of their attributes and buffers, and containers
    in attributes.

    Yields:
        (the module or object whose attributes the container is, else None; the container).
    """
    seen: set[int] = set()
    for submodule in module.modules():
        yield from _holders_of_module(submodule, seen)


def _holders_of_module(module: nn.Module, seen: set[int]) -> Iterator[tuple[Any, _Holder]]:
    """The containers with state of one module; ``seen``: ids of objects that were looked at before."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield None, buffers_in(module)
    if is_scripted(module):
        return
    attributes = vars(module)
    yield module, attributes
    for name in _HOOKS:
        yield None, attributes[name]
    for key, value in list(attributes.items()):
        if type(value) not in PLAIN and key not in _INTERNAL:
            yield from _holders_within(value, seen, _DEPTH)


def _holders_within(value: Any, seen: set[int], depth: int) -> Iterator[tuple[Any, _Holder]]:
    """The containers with state in the value of an attribute, up to ``depth`` deep."""
    if type(value) in PLAIN or isinstance(value, (Tensor, type, ModuleType)) or id(value) in seen or not depth:
        return
    if isinstance(value, nn.Module):  # in a plain container, where torch does not find it
        for module in value.modules():
            yield from _holders_of_module(module, seen)
        return
    items: Any = ()
    if isinstance(value, tuple):
        items = value
    elif isinstance(value, (dict, list, set, deque)):
        if holds_parameters(value):
            return
        items = _values(value)
        yield None, value
    elif is_plain_object(value):
        items = list(attributes_in(value).values())
        yield value, attributes_in(value)
    seen.add(id(value))
    for item in items:
        yield from _holders_within(item, seen, depth - 1)


def _values(holder: _Holder) -> list[Any]:
    """The values in a container; of a module's attributes, those that may be state."""
    if isinstance(holder, _MAPPINGS):
        internal = _INTERNAL if "_parameters" in holder else ()
        return [value for key, value in holder.items() if key not in internal]
    return list(holder)


def content_of(holder: _Holder) -> Any:
    """A shallow copy of a container's items, for ``fill``."""
    return dict(holder) if isinstance(holder, _MAPPINGS) else list(holder)


def _has_content(holder: _Holder, content: Any) -> bool:
    """Whether a container has just the items of ``content``, in this order. Most have, and need no ``fill``."""
    if len(holder) != len(content):
        return False
    if isinstance(holder, _MAPPINGS):
        return all(map(is_, holder.values(), content.values())) and list(holder) == list(content)
    return all(map(is_, holder, content))


def replace(holder: _Holder, content: Any, but: Container[Any] | None = frozenset()) -> Any:
    """Writes items to a container, except under the keys ``but`` (None: nothing is written).

    Args:
        content: from ``content_of``.

    Returns:
        What was replaced, for ``put_back``: (key → the value; ``_MISSING`` if there was none) of a mapping, else all items.
        Empty if nothing was.
    """
    if but is None or _has_content(holder, content):
        return {}
    if not isinstance(holder, _MAPPINGS):
        items = content_of(holder)
        fill(holder, content)
        return {"items": items}
    internal = _INTERNAL if "_parameters" in holder else ()
    keys = [k for k in {**content, **holder} if k not in internal and k not in but]
    replaced = {k: holder.get(k, _MISSING) for k in keys if holder.get(k, _MISSING) is not content.get(k, _MISSING)}
    put_back(holder, {k: content.get(k, _MISSING) for k in replaced})
    return replaced


def put_back(holder: _Holder, replaced: Mapping[Any, Any]) -> None:
    """Writes back what ``replace`` has replaced."""
    if not isinstance(holder, _MAPPINGS):
        for items in replaced.values():
            fill(holder, items)
        return
    for key, value in replaced.items():
        if value is _MISSING:
            holder.pop(key, None)
        else:
            holder[key] = value


def hook_tables(model: nn.Module) -> list[MutableMapping[str, Any]]:
    """The tables of forward hooks of all modules that have any of their own."""
    return [vars(m)[name] for m in model.modules() for name in _HOOKS if name in vars(m)]


def fill(holder: _Holder, content: Any, copies: Mapping[int, Tensor] = MappingProxyType({})) -> None:
    """Writes items back to a container. Of a module's attributes only those that may be state are written.

    Args:
        content: from ``content_of``.
        copies: id of a tensor → the copy that takes its place.
    """
    if isinstance(holder, _MAPPINGS):
        internal = _INTERNAL if "_parameters" in holder else ()
        for key in [k for k in holder if k not in content and k not in internal]:
            del holder[key]
        for key, value in content.items():
            if key not in internal:
                holder[key] = _with_copies(value, copies)
    elif isinstance(holder, set):
        holder.clear()
        for value in content:
            holder.add(value)
    else:
        holder.clear()
        holder.extend(_with_copies(value, copies) for value in content)


def _with_copies(value: Any, copies: Mapping[int, Tensor]) -> Any:
    """A value, with copies in place of its tensors. A function of the module, not a closure of ``fill``: a recursive
    closure is a reference cycle, which would hold the copies until the next garbage collection."""
    if isinstance(value, tuple) and copies:
        items = [_with_copies(item, copies) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copies.get(id(value), value)
