"""What a forward may leave on its modules: buffers, hooks of forwards, and attributes that are tensors, numbers or containers
of these.

Parameters, submodules and other hooks are not part of it: these are the optimizer's, the layout's and FSDP2's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
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
from meshwright.calls.structure import attributes_in, buffers_in, is_plain_object, is_scripted
from meshwright.private import modules_of, set_version, version, without_modes
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.dispatcher import whole
from meshwright.spmd.tensor import GlobalTensor

_CONSTANT = frozenset([int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice])
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
)  # a model may register some in its first forward, and note that it has
_DEPTH = 4  # how far into containers and plain objects to look
_Holder = MutableMapping[Any, Any] | list[Any] | set[Any] | deque[Any]


class ModuleState:
    """The state of a module and of the modules in it, as it is when this is made.

    Tensors are copied, as a forward may write to them in place; tensors with a gradient are kept as they are.

    Args:
        parameters: those that a forward may write to (the average of another's, in a momentum encoder).
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._module = module
        self._parameters = [_Written.of(p) for p in parameters]
        self._contents: list[tuple[_Holder, Any]] = []  # what holds values, and a copy of what it holds
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        for holder in holders(module):
            self._contents.append((holder, content_of(holder)))
            for value in _values(holder):
                self._copy_within(value)

    def now(self) -> ModuleState:
        """The same of what it is now."""
        return ModuleState(self._module, [p.parameter for p in self._parameters])

    def _copy_within(self, value: Any) -> None:
        if isinstance(value, tuple):
            for item in value:
                self._copy_within(item)
        elif is_state(value) and not value.requires_grad and id(value) not in self._copies:
            self._copies[id(value)] = value, _copy(value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """For the time of a block the modules have this state, in tensors of its own; then that of before the block."""
        now = [(holder, content_of(holder)) for holder, _ in self._contents]
        copies = {key: _copy(copy) for key, (_, copy) in self._copies.items()}
        written = [_Written.of(p.parameter) for p in self._parameters]
        for holder, content in self._contents:
            fill(holder, content, copies)
        for p in self._parameters:
            p.restore()
        try:
            yield
        finally:
            for holder, content in now:
                fill(holder, content)
            for p in written:
                p.restore()


@dataclass(frozen=True)
class _Written:
    """A parameter that a forward may write to: where its values stood, which they were, and how often it had been written.

    To autograd a restored parameter is as often written as before: a forward that begins with it and writes to it leaves
    what earlier forwards of the step have left, and have saved for their backward, which may be still to come.
    """

    parameter: nn.Parameter
    held: Tensor
    value: Tensor
    version: int | None

    @classmethod
    def of(cls, p: nn.Parameter) -> _Written:
        held = local_tensor(p).detach()
        return cls(p, held, held.clone(), version(held))

    def restore(self) -> None:
        """The parameter stays the same object; where the forward has put other memory in its place (``p.data = ...``), it
        has that of before."""
        now = local_tensor(self.parameter)
        if now.data_ptr() != self.held.data_ptr() or now.dtype != self.held.dtype:
            now.data = self.held
        self.held.data.copy_(self.value)
        set_version(self.held, self.version)


def _copy(value: Tensor) -> Tensor:
    """A copy that a forward does not see being made: to a stage, a copy of one of the model's values would be an event."""
    if isinstance(value, Placeholder):
        return value  # its memory is on other ranks
    with torch.no_grad(), without_modes():
        copy: Tensor = (
            value._mw_dispatcher.call(Tensor.clone, (value,), {})
            if isinstance(value, GlobalTensor)
            else value.detach().clone()
        )
    return copy


class Leftovers:
    """What forwards leave on the modules of a model as global tensors.

    Most modules have constants and plain buffers alone. These are looked into again only if one of them has got, or lost,
    something since: what they hold is compared, after each step, with what it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._holders: list[Mapping[str, Any]] = []  # of the plain modules: attributes, buffers
        self._then: list[Any] = []  # what is in these
        self._children: list[Mapping[str, Any]] = []
        self._children_then: list[Mapping[str, Any]] = []
        self._noteworthy: list[nn.Module] | None = None

    def make_whole(self) -> None:
        """They become plain tensors, whole on every rank: a buffer that a forward assigned, a list of statistics. Whoever reads
        it later, on one rank alone perhaps, then finds what one device has. Collective over the ranks that ran the forward."""
        if self._noteworthy is None or not self._is_as_it_was():
            self._look()
        seen: set[int] = set()
        for holder in (holder for within in self._noteworthy or () for holder in _of_module(within, seen)):
            if any(map(_has_view, _values(holder))):
                _make_whole(holder)

    def _look(self) -> None:
        modules = list(modules_of(self._model))
        plain = {id(m) for m in modules if _is_plain(m)}
        self._noteworthy = [m for m in modules if id(m) not in plain]
        mine = [m for m in modules if id(m) in plain and not is_scripted(m)]
        self._holders = [holder for m in mine for holder in (vars(m), buffers_in(m))]
        self._then = _everything(self._holders)
        self._children = [vars(m)["_modules"] for m in modules]
        self._children_then = [dict(children) for children in self._children]

    def _is_as_it_was(self) -> bool:
        now = _everything(self._holders)
        same = len(now) == len(self._then) and all(map(is_, now, self._then))
        return same and self._children == self._children_then


def _everything(holders: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(holder.values() for holder in holders)]


def _make_whole(holder: _Holder) -> None:
    if isinstance(holder, MutableMapping):
        internal = _INTERNAL if "_parameters" in holder else ()
        holder.update({k: _whole(v) for k, v in holder.items() if k not in internal})
    elif not isinstance(holder, set):  # a set holds no global tensors: they are not hashable
        for i, value in enumerate(holder):
            holder[i] = _whole(value)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has constants and plain buffers alone, as most do: told at once."""
    if is_scripted(module):
        return True
    attributes = vars(module)
    for name in attributes.keys() - _INTERNAL:
        value = attributes[name]
        if type(value) not in _CONSTANT and not _is_plain_tuple(value):
            return False
    return GlobalTensor not in map(type, vars(module)["_buffers"].values())


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in _CONSTANT for item in value)


def _has_view(value: Any) -> bool:
    return isinstance(value, GlobalTensor) or (type(value) is tuple and any(map(_has_view, value)))


def _whole(value: Any) -> Any:
    return tuple(map(_whole, value)) if type(value) is tuple else whole(value)


def is_state(value: Any) -> bool:
    """Whether a value is a tensor that a forward may leave on a module: no parameter."""
    return isinstance(value, Tensor) and not isinstance(value, (nn.Parameter, DTensor))


def holds_parameters(value: Any) -> bool:
    """Whether a value is a container of parameters, as recurrent modules have one: FSDP2 puts others in their place in it
    while they are gathered, and a copy of it would hold those for ever."""
    return isinstance(value, (dict, list, set, deque)) and any(isinstance(x, nn.Parameter) for x in _values(value))


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's plain attributes: name and value."""
    return ((key, value) for key, value in vars(module).items() if key not in _INTERNAL)


def holders(module: nn.Module) -> Iterator[_Holder]:
    """Everything that holds state of a module and of the modules in it: dicts of attributes and buffers, containers."""
    seen: set[int] = set()
    for within in module.modules():
        yield from _of_module(within, seen)


def _of_module(module: nn.Module, seen: set[int]) -> Iterator[_Holder]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield buffers_in(module)
    if is_scripted(module):
        return
    attributes = vars(module)
    yield attributes
    yield from (attributes[name] for name in _HOOKS)
    for key, value in list(attributes.items()):
        if type(value) not in _CONSTANT and key not in _INTERNAL:
            yield from _within(value, seen, _DEPTH)


def _within(value: Any, seen: set[int], depth: int) -> Iterator[_Holder]:
    if type(value) in _CONSTANT or isinstance(value, (Tensor, type, ModuleType)) or id(value) in seen or not depth:
        return
    if isinstance(value, nn.Module):  # one that stands in a container, where torch does not find it
        for module in value.modules():
            yield from _of_module(module, seen)
        return
    items: Any = ()
    if isinstance(value, tuple):
        items = value
    elif isinstance(value, (dict, list, set, deque)):
        if holds_parameters(value):
            return
        items = _values(value)
        yield value
    elif is_plain_object(value):
        items = list(attributes_in(value).values())
        yield attributes_in(value)
    seen.add(id(value))
    for item in items:
        yield from _within(item, seen, depth - 1)


def _values(holder: _Holder) -> list[Any]:
    if isinstance(holder, MutableMapping):
        internal = _INTERNAL if "_parameters" in holder else ()
        return [value for key, value in holder.items() if key not in internal]
    return list(holder)


def content_of(holder: _Holder) -> Any:
    """What a container holds, for ``fill``."""
    return dict(holder) if isinstance(holder, MutableMapping) else list(holder)


def fill(holder: _Holder, content: Any, copies: Mapping[int, Tensor] = MappingProxyType({})) -> None:
    """Puts a content back, with the copies of its tensors. Of a module's attributes, those that are state."""
    if isinstance(holder, MutableMapping):
        internal = _INTERNAL if "_parameters" in holder else ()
        for key in [k for k in holder if k not in content and k not in internal]:
            del holder[key]
        for key, value in content.items():
            if key not in internal:
                holder[key] = _own(value, copies)
    elif isinstance(holder, set):
        holder.clear()
        for value in content:
            holder.add(value)
    else:
        holder.clear()
        holder.extend(_own(value, copies) for value in content)


def _own(value: Any, copies: Mapping[int, Tensor]) -> Any:
    """A value, with the copies of its tensors. No function within ``fill``: one that calls itself would hold the copies until
    Python collects garbage."""
    if isinstance(value, tuple) and copies:
        items = [_own(item, copies) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copies.get(id(value), value)
