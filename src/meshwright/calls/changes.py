"""What a call of a module changes in containers and plain objects among its arguments: a cache, a list of hidden states.

A recording finds these changes (``Holders``). On ranks that do not run the call, ``make_changes`` makes them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from meshwright.calls.structure import (
    attributes_in,
    holds_code,
    is_constant,
    is_plain_object,
    put_tensors,
    snapshot,
    tensors_of,
)
from meshwright.graph import Change, Step

_DEPTH = 8  # levels of containers and objects: (args, kwargs), kwargs, a cache, a part of it, its layers, a layer


class Holders:
    """The containers and objects among the arguments of a call, with their items before the call.

    Args:
        arguments: (args, kwargs) of the call.
    """

    def __init__(self, arguments: Any) -> None:
        self._before = [(where, holder, _items(holder)) for where, holder in _holders(arguments)]
        self._ids = {id(holder) for _, holder, _ in self._before if not isinstance(holder, tuple)}

    def changes(
        self, number: Callable[[Tensor], int | None], lasting: Container[int]
    ) -> tuple[tuple[Change, ...], bool, bool]:
        """What has changed since.

        Args:
            number: a tensor → the number of its value; None if it is no value.
            lasting: ids of containers and objects that are older than the forward. Their changes count in the next forward too.

        Returns:
            (the changes that ``make_changes`` can make; whether these are all changes; whether they would be if none counted in
            the next forward, and each tensor in them were a value).
        """
        changed = [
            (where, holder, before) for where, holder, before in self._before if not _same_items(before, _items(holder))
        ]
        possible = [_change(where, holder, before) for where, holder, before in changed]
        changes = [change for change in possible if change is not None]
        repeatable = None not in possible
        # A copy of a container or object that is older than the call would be another one.
        new_holders = (holder for change in changes for _, holder in _holders(change.items))
        repeatable = repeatable and not any(id(holder) in self._ids for holder in new_holders)
        # One snapshot of all items, as an object may be an item of several containers.
        items = snapshot([change.items for change in changes], _unchanged)
        numbers = [tuple(map(number, tensors_of(one))) for one in items]
        repeatable = repeatable and not holds_code(items)
        lasts = any(id(holder) in lasting for _, holder, _ in changed)
        complete = repeatable and not lasts and not any(None in one for one in numbers)
        return tuple(map(Change.with_items, changes, items, numbers)), complete, repeatable


def holders_in(value: Any) -> dict[int, Any]:
    """id → container or object, for all within ``value`` that can change."""
    return {id(holder): holder for _, holder in _holders(value) if not isinstance(holder, tuple)}


def map_changed(fn: Callable[[Tensor], Any], change: Change, arguments: Any) -> list[Any]:
    """Replaces each tensor t that a call left by ``fn(t)``, where the call left it. Returns the items with these tensors.

    Args:
        arguments: (args, kwargs) of the call, which has run.

    Raises:
        LookupError: there is no such item.
    """
    holder = _at(change.where, arguments)
    is_list = isinstance(holder, list)
    table = holder if is_list else _table(holder)
    keys = _indices(holder, change) if is_list else [*change.items]
    for key in keys:
        item = put_tensors(fn, table[key])
        if item is not table[key]:
            table[key] = item
    return [table[key] for key in keys]


def before_of(change: Change, arguments: Any) -> list[Tensor | None]:
    """For each tensor among a change's new items, the tensor in whose place it comes; None if there was none.

    Args:
        arguments: (args, kwargs) of the call.

    Raises:
        LookupError: there is no such container or object.
    """
    before = _items(_at(change.where, arguments))
    tensors: list[Tensor | None] = []
    for key, item in change.items.items():
        old, new = before.get(key), tensors_of(item)
        tensors += [old if isinstance(old, Tensor) and isinstance(item, Tensor) else None] * len(new)
    return tensors


def make_changes(changes: Sequence[Change], arguments: Any, memo: dict[int, Any]) -> None:
    """Makes the recorded changes of a call that does not run on this rank.

    Args:
        arguments: (args, kwargs) of the call in this forward.
        memo: id of a recorded tensor → the tensor in its place, as ``copy.deepcopy`` takes it.

    Raises:
        LookupError: an item is not what it was before the recorded call.
        Exception: of whatever type, before anything is changed: an item cannot be copied.
    """
    new_items = copy.deepcopy([change.items for change in changes], memo)
    for change, items in zip(changes, new_items, strict=True):
        holder = _at(change.where, arguments)
        is_list = isinstance(holder, list)
        table = dict(enumerate(holder)) if is_list else _table(holder)
        for key, before in change.before.items():
            if _constant(table, key) != before:
                raise LookupError(key)
        if is_list:
            holder.extend(item for key, item in items.items() if key >= change.length)
            table = holder
            items = {key: item for key, item in items.items() if key < change.length}
        for key in change.removed:
            del table[key]
        for key, item in items.items():
            table[key] = item


# --- containers and objects -------------------------------------------------------------------------------------------


def _holders(value: Any) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """(the path to it, container or object) for each within ``value``, each once."""
    seen: set[int] = set()

    def look(item: Any, where: tuple[Step, ...]) -> Iterator[tuple[tuple[Step, ...], Any]]:
        if not _is_holder(item) or id(item) in seen or len(where) > _DEPTH:
            return
        seen.add(id(item))
        yield where, item
        of_object = not isinstance(item, (dict, list, tuple, set, deque))
        for key, part in _items(item).items():
            yield from look(part, (*where, (of_object, key)))

    return look(value, ())


def _is_holder(item: Any) -> bool:
    """Whether an item is a container, or an object that is no tensor, module (of torch or of Python), class or function."""
    if isinstance(item, (dict, list, tuple, set, deque)):
        return True
    if is_constant(item) or isinstance(item, (Tensor, nn.Module, ModuleType, type)) or callable(item):
        return False
    return hasattr(item, "__dict__") or is_plain_object(item)


def _items(holder: Any) -> dict[Any, Any]:
    """Key → item of a container; name → attribute of an object."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, set):
        return {id(item): item for item in holder}
    return dict(enumerate(holder)) if isinstance(holder, (list, tuple, deque)) else dict(attributes_in(holder))


def _table(holder: Any) -> MutableMapping[Any, Any]:
    """The items of a dict, or the attributes of an object, to write to."""
    return holder if isinstance(holder, dict) else attributes_in(holder)


def _at(where: Sequence[Step], arguments: Any) -> Any:
    """The container or object at a path.

    Raises:
        LookupError: there is none.
    """
    holder = arguments
    for of_object, key in where:
        try:
            holder = attributes_in(holder)[key] if of_object else holder[key]
        except TypeError:  # something without items or attributes, as None
            raise LookupError(key) from None
    return holder


# --- changes ----------------------------------------------------------------------------------------------------------


def _indices(holder: list[Any], change: Change) -> list[int]:
    """The indices of a changed list's new items, of which the appended ones are the last.

    Raises:
        LookupError: an item that was replaced is not where it was in the recorded call.
    """
    appended = sum(key >= change.length for key in change.items)
    offset = len(holder) - change.length - appended
    if offset and appended < len(change.items):
        raise LookupError(offset)
    return [key + offset for key in change.items]


def _change(where: tuple[Step, ...], holder: Any, before: dict[Any, Any]) -> Change | None:
    """The change of a container or object; None if ``make_changes`` cannot make it."""
    now = _items(holder)
    items = {key: item for key, item in now.items() if key not in before or not _same(before[key], item)}
    removed = tuple(key for key in before if key not in now)
    if type(holder) is list:
        replaced = {key: _constant(before, key) for key in items if key < len(before)}
        return None if removed else Change(where, items, before=replaced, length=len(before))
    if type(holder) is dict or is_plain_object(holder):
        return Change(where, items, removed, {key: _constant(before, key) for key in (*items, *removed)})
    return None


def _same_items(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(item, b[key]) for key, item in a.items())


def _same(a: Any, b: Any) -> bool:
    """Whether two items are the same object, or equal constants."""
    return a is b or (type(a) is type(b) and is_constant(a) and bool(a == b))


def _constant(table: MutableMapping[Any, Any], key: Any) -> Any:
    """(type, value) of a constant among items; the type alone of another item; None if there is none. A list of constants is
    none: it may change."""
    if key not in table:
        return None
    item = table[key]
    if isinstance(item, Tensor):  # or a placeholder, on other stages
        return Tensor
    return type(item) if _is_holder(item) or not is_constant(item) else (type(item), item)


def _unchanged(t: Tensor) -> Tensor:
    return t
