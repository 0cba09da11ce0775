"""``StateSnapshot``: the state that a model's modules keep between forwards. Planning runs several forwards and restores this
state after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.structure import (
    attributes_in,
    buffers_in,
    is_plain_object,
    is_scripted,
    plain_objects,
    tensors_of,
)
from meshwright.calls.tracer import Slot
from meshwright.chance import held_kept
from meshwright.code_state import CodeState
from meshwright.private import storage_of, without_any_mode


@dataclass(frozen=True)
class _Content:
    """The content of a slot at the time of the snapshot.

    Attributes:
        value: the object itself, not a copy.
        items: for a list, set or dict a shallow copy; for a tensor with values a copy of them; else None.
    """

    value: Any
    items: Any

    @staticmethod
    def of(value: Any) -> _Content:
        if type(value) is Tensor and not value.is_meta:
            return _Content(value, value.detach().clone())
        if isinstance(value, (list, set)):
            return _Content(value, type(value)(value))
        if isinstance(value, dict):
            return _Content(value, dict(value))
        return _Content(value, None)

    def same(self, now: Any) -> bool:
        """Whether ``now`` is the same object with the same items; constants are compared by type and value."""
        if isinstance(self.value, (bool, int, float, complex, str, bytes, type(None))):
            return type(now) is type(self.value) and bool(now == self.value)
        if now is not self.value:
            return False
        return self.items is None or isinstance(now, Tensor) or _identities(now) == _identities(self.items)

    def put_back(self) -> None:
        if isinstance(self.items, Tensor):
            if self.value.shape == self.items.shape:  # ``data`` leaves the version counter, which autograd graphs check
                self.value.data.copy_(self.items)
        elif self.items is not None and not self.same(self.value):
            self.value.clear()
            if isinstance(self.value, list):
                self.value.extend(self.items)
            else:
                self.value.update(self.items)


def _identities(container: Any) -> Any:
    if isinstance(container, dict):
        return [(k, id(v)) for k, v in container.items()]
    return sorted(map(id, container)) if isinstance(container, set) else list(map(id, container))


_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}


_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks")))


class StateSnapshot:
    """A snapshot of a model's state when it is created. It covers:

    - buffers, and attributes of modules that are not torch's own;
    - attributes of the plain objects within these;
    - forward hooks, since a model may register some in its first forward;
    - what the model's code keeps outside of modules (``CodeState``);
    - the memory of parameters on meta, since a forward may cast them, or assign other data.
    """

    def __init__(self, model: nn.Module) -> None:
        with without_any_mode():  # so that no mode counts this as a use of the parameters
            self._parameters = [(p, p.data) for p in model.parameters() if p.is_meta]
        self._code = CodeState(model)
        tables = (vars(module)[name] for module in model.modules() for name in _HOOKS if name in vars(module))
        self._hooks = [(table, dict(table)) for table in tables]
        self._tables = [
            (table, (path, within), {key: _Content.of(table[key]) for key in own_attributes(table)})
            for path, within, table in _tables(model)
        ]
        self._before = {
            (path, f"{within}{key}"): content
            for _, (path, within), before in self._tables
            for key, content in before.items()
        }

    def changed(self, written: Iterable[int]) -> list[Slot]:
        """The slots that have another content now, that are new or gone, or whose tensors lie in memory that was written.

        Args:
            written: the memories (addresses of storages) to which the forward wrote.
        """
        memories = set(written)

        def differs(content: _Content | None, table: MutableMapping[str, Any], key: str) -> bool:
            if content is None or key not in table or not content.same(table[key]):
                return True
            return any(has_memory(t) and storage_of(t) in memories for t in _tensors(content.value))

        return [
            (path, f"{within}{key}")
            for table, (path, within), before in self._tables
            for key in dict.fromkeys((*before, *own_attributes(table)))
            if differs(before.get(key), table, key)
        ]

    def hooks_changed(self) -> bool:
        """Whether modules have other forward hooks now."""
        return any(table.keys() != before.keys() for table, before in self._hooks)

    def by_python(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those of ``slots`` that held no tensor, or did not exist: Python may act on them (``if self.last is not None``)."""
        return [s for s in slots if s not in self._before or not isinstance(self._before[s].value, Tensor)]

    def memories(self) -> set[int]:
        """The memories of the tensors in the snapshot."""
        return {storage_of(t) for content in self._before.values() for t in _tensors(content.value) if has_memory(t)}

    def put_back(self) -> None:
        """Restores every slot, hook and parameter of the snapshot, and removes new slots."""
        self._code.put_back()
        with without_any_mode():
            self._put_back()

    def _put_back(self) -> None:
        for p, data in self._parameters:
            if storage_of(p) != storage_of(data):
                p.data = data
        for table, before in self._hooks:
            if table.keys() != before.keys():
                table.clear()
                table.update(before)
        for table, _, before in self._tables:
            for key in [key for key in own_attributes(table) if key not in before]:
                del table[key]
            for key, content in before.items():
                content.put_back()
                if key not in table or table[key] is not content.value:
                    table[key] = content.value


def undisturbed(model: nn.Module, run: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """``run``, wrapped: after it, the modules' state and the state of their own generators are as before. Planning runs several
    forwards, and training must begin with the first one's state."""

    def restoring(module: nn.Module) -> Any:
        snapshot = StateSnapshot(model)
        try:
            with held_kept(model):
                return run(module)
        finally:
            snapshot.put_back()

    return restoring


def _tables(model: nn.Module) -> Iterator[tuple[str, str, MutableMapping[str, Any]]]:
    """The dicts that hold the state: of each module its buffers and attributes, and of each plain object within attributes its
    attributes. An object appears once. (Buffers are read from the module's own dict: no public method shows or restores those
    that are None.)

    Yields:
        (the module's name, the prefix of names in this dict, the dict).
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        yield path, "", buffers_in(module)
        if is_scripted(module):
            continue
        yield path, "", vars(module)
        for key in own_attributes(vars(module)):
            for name, owner in plain_objects(key, vars(module)[key], seen):
                yield path, f"{name}.", attributes_in(owner)


def own_attributes(table: MutableMapping[str, Any]) -> list[str]:
    return [key for key in table if key not in _OF_TORCH] if "_parameters" in table else list(table)


def _tensors(value: Any) -> list[Tensor]:
    is_state = not isinstance(value, nn.Module) and (is_plain_object(value) or not callable(value))
    return tensors_of(value) if is_state else []


def contents(value: Any, depth: int = 4) -> list[tuple[int, Any]]:
    """Identities of all items within a value, through containers and plain objects, ``depth`` levels deep.

    Two calls give different lists if an item was added, removed or replaced in between.
    """
    identities: list[tuple[int, Any]] = []

    def look(item: Any, depth: int) -> None:
        if isinstance(item, (Tensor, nn.Module, type)) or callable(item):
            return
        if isinstance(item, (bool, int, float, complex, str, bytes, type(None))):
            identities.append((0, item))
            return
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple, set)) else None
        if inner is None and hasattr(item, "__dict__"):
            inner = vars(item).values()
        if inner is None:
            return
        inner = list(inner)
        identities.append((id(item), list(map(id, inner))))
        if depth:
            for part in inner:
                look(part, depth - 1)

    look(value, depth)
    return identities


def has_memory(t: Tensor) -> bool:
    """Whether a tensor has a storage whose address identifies its memory: whether it is strided."""
    return t.layout is torch.strided
