"""``Switches``: what a person sets on the modules of a model between steps: flags, numbers, hooks.

    job.step(batch)
    model.aux_weight = 0.1                        # an attribute of a module, or an item of a dict or plain object that it keeps
    model.head.register_forward_hook(normalise)   # a hook
    job.step(batch)

What was found out about a forward (how its rows combine, which way it takes) was found with what stood there then. What a
forward sets itself is no switch: only what differs between the end of a step and the beginning of the next one is.

Planning follows forwards on a model of its own, with shapes alone. If the model that trains was changed between steps, a
forward is recorded anew with the same changes there (``switched``). Forward hooks are left out: most of them look at what a
module gives, on the rank where it runs, and planning would call them once more, on every rank, with values that are none.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.private import BACKWARD_HOOK_TABLES, HOOK_TABLES

OWN, CHILDREN = "", "_modules"
"""What keeps an attribute of a module itself, and a child of it."""

_MOST_ITEMS = 256  # of a container; what has more is data


class _Gone:
    """Stands for what is not there any more."""


GONE = _Gone()


class Switch(NamedTuple):
    """Where something stands.

    Attributes:
        module: the name of a module.
        holder: what holds it: the module itself (``OWN``), a table of the module's hooks, or the module's attribute of this
            name, which is a dict or an object.
        key: the name of an attribute, or an item's key.
    """

    module: str
    holder: str
    key: Any


def items_of(value: Any) -> dict[Any, Any] | None:
    """The items of a dict, or the attributes of a plain object (a model's configuration); None for what keeps none, or many."""
    if isinstance(value, (Tensor, nn.Module, type, Callable)):  # type: ignore[arg-type]
        return None
    items = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return items if isinstance(items, dict) and len(items) <= _MOST_ITEMS else None


NO_SWITCHES: Mapping[Switch, Any] = MappingProxyType({})


@contextmanager
def switched(model: nn.Module, switches: Mapping[Switch, Any]) -> Iterator[None]:
    """For the time of a block these switches of a model are set. Parameters, children and forward hooks stay the model's own;
    of another tensor the shape is there, as of all tensors of the model that planning has."""
    modules, before = dict(model.named_modules()), list[tuple[dict[Any, Any], dict[Any, Any]]]()
    try:
        for switch, value in switches.items():
            items = _table(modules.get(switch.module), switch.holder) if _is_recorded(switch) else None
            if items is None or isinstance(value, nn.Module) or (switch.holder, switch.key) == (OWN, "forward"):
                continue
            if isinstance(value, Tensor):
                if type(value) is not Tensor:
                    continue
                value = _shape_of(value)
            before.append((items, dict(items)))
            if value is GONE:
                items.pop(switch.key, None)
            else:
                items[switch.key] = value
        yield
    finally:
        for items, held in reversed(before):
            items.clear()
            items.update(held)


def _is_recorded(switch: Switch) -> bool:
    """Whether a forward is recorded anew for it."""
    return switch.holder not in HOOK_TABLES or switch.holder in BACKWARD_HOOK_TABLES


def _shape_of(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad)


def _table(module: nn.Module | None, holder: str) -> dict[Any, Any] | None:
    """What holds an item there."""
    if module is None or holder == CHILDREN:
        return None
    if holder == OWN:
        return vars(module)
    return getattr(module, holder) if holder in HOOK_TABLES else items_of(vars(module).get(holder))


_NUMBERS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype)
_UNSEEN = frozenset({"training"})  # see evaluation.py
_OF_TORCH = frozenset(vars(nn.Module()))
_TOLD_APART = 8  # values of a switch; further numbers are told by their signs


class Switches:
    """What a person has changed of a model between steps, since it was laid out.

    Attributes:
        told: equal for two steps between which nothing was changed; hashable.
        path: as ``told``, without forward hooks; of a switch that was changed often, a number's sign alone. A forward is
            recorded anew for each.
        now: what stands at each switch.
        common: ``path`` and ``now`` when they were last the same on all ranks of a copy of the model.
        changed: whether something was ever changed; once ranks have agreed, on any rank of a copy of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._changes = model, 0
        self._told: dict[Switch, Hashable] = {}
        self._seen: dict[Switch, set[Hashable]] = {}
        self.told: Hashable = None
        self.path: Hashable = None
        self.now: Mapping[Switch, Any] = {}
        self.common: tuple[Hashable, Mapping[Switch, Any]] = None, {}
        self.changed = False
        self._digests: tuple[Hashable, tuple[int, int]] = None, (0, 0)
        self._tables = list(_tables(model))

    def note(self) -> None:
        """What stands there now is what a forward has left."""
        if not all(table.same() for table in self._tables):
            self._tables = list(_tables(self._model))

    def look(self) -> None:
        """Sees what was changed since ``note``."""
        tables = [table for table in self._tables if not table.same()]
        if not tables:
            return
        now, self.changed = dict(self.now), True
        for table in tables:
            for switch, value in table.differences():
                now[switch] = value
                self._tell(switch, value)
        self.now, self.told = now, frozenset(self._told.items())
        self.path = frozenset((switch, self._coarse(switch)) for switch in now if _is_recorded(switch))
        self._tables = list(_tables(self._model))

    def agree(self, *, same: bool, changed: bool) -> None:
        """What ranks of a copy of the model have told each other: whether what a forward is recorded anew for is the ``same``
        on all; whether something was ever ``changed`` on any."""
        self.changed = changed
        if same:
            self.common = self.path, self.now

    @property
    def hooked(self) -> tuple[str, ...]:
        """The modules of which hooks for the backward were changed."""
        return tuple(sorted({switch.module for switch in self.now if switch.holder in BACKWARD_HOOK_TABLES}))

    def digests(self) -> tuple[int, int]:
        """Two numbers below 2**32: of the hooks for the backward that were changed, and of all that a forward is recorded anew
        for. They are equal on ranks on which the same was done."""
        if self._digests[0] is not self.path:
            # The key of a hook is a number of the process's own.
            recorded = filter(_is_recorded, self.now)
            places = {s: (s.module, s.holder, "" if s.holder in HOOK_TABLES else str(s.key)) for s in recorded}
            hooks = sorted((*at, self.now[s] is GONE) for s, at in places.items() if s.holder in HOOK_TABLES)
            path = sorted((*at, repr(self._coarse(s))) for s, at in places.items())
            numbers = zlib.crc32(repr(hooks).encode()), zlib.crc32(repr(path).encode())
            self._digests = self.path, numbers
        return self._digests[1]

    def _tell(self, switch: Switch, value: Any) -> None:
        self._changes += 1
        # What an object is told by does not keep it: each is another one.
        self._told[switch] = (type(value).__name__, value) if isinstance(value, _NUMBERS) else self._changes
        seen = self._seen.setdefault(switch, set())
        if len(seen) < _TOLD_APART:
            seen.add(self._told[switch])

    def _coarse(self, switch: Switch) -> Hashable:
        told = self._told[switch]
        if told in self._seen[switch]:
            return told
        value = told[1] if isinstance(told, tuple) else None
        return (value > 0) - (value < 0) if isinstance(value, (int, float)) else "another"


class _Table:
    """What holds switches, and what it held."""

    def __init__(self, module: str, holder: str, items: dict[Any, Any]) -> None:
        self._module, self._holder, self._items, self._before = module, holder, items, dict(items)

    def same(self) -> bool:
        """Whether it holds the same objects still, in their order."""
        items, before = self._items, self._before
        return items.keys() == before.keys() and all(map(is_, items.values(), before.values()))

    def differences(self) -> Iterator[tuple[Switch, Any]]:
        """(where, what stands there now, or ``GONE``) of each item that is not what it was."""
        items, before = self._items, self._before
        for key in {**before, **items}:
            now, then = items.get(key, GONE), before.get(key, GONE)
            equal = now is then or (type(now) is type(then) and isinstance(now, _NUMBERS) and now == then)
            if not equal and key not in _UNSEEN:
                yield Switch(self._module, self._holder, key), now


class _NoHooks:
    """The tables of a module that had no hooks: most have none, and to ask each table would take longer."""

    def __init__(self, module: str, tables: dict[str, dict[int, Any]]) -> None:
        self._module, self._tables, self._each = module, tables, tuple(tables.values())

    def same(self) -> bool:
        """Whether it has none still."""
        return not any(self._each)

    def differences(self) -> Iterator[tuple[Switch, Any]]:
        """Its hooks."""
        for holder, table in self._tables.items():
            yield from ((Switch(self._module, holder, key), hook) for key, hook in table.items())


def _tables(model: nn.Module) -> Iterator[_Table | _NoHooks]:
    """What modules keep: attributes, hooks, children, and the items of what they keep."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        attributes = vars(module)
        yield _Table(name, OWN, attributes)
        hooks = {
            holder: attributes[holder] for holder in HOOK_TABLES if holder in attributes
        }  # what torch.jit traced has none
        if any(hooks.values()):
            yield from (_Table(name, holder, table) for holder, table in hooks.items())
        elif hooks:
            yield _NoHooks(name, hooks)
        if attributes.get(CHILDREN):
            yield _Table(name, CHILDREN, attributes[CHILDREN])
        for key, value in attributes.items():
            if key not in _OF_TORCH and (items := items_of(value)) is not None and id(items) not in seen:
                seen.add(id(items))
                yield _Table(name, key, items)


__all__ = ["NO_SWITCHES", "Switch", "Switches", "switched"]
