"""Tensors within whatever a module takes or returns: tuples, dicts, dataclasses, plain objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.private import pytree

_DEPTH = 6  # how far into plain objects to look
_PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, slice))


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``fn`` of each of its tensors in their places.

    Containers that pytree knows are built anew; plain objects and dataclasses keep their identity and are written to,
    as a model may hold on to them.
    """
    return _map(fn, value, _DEPTH)


def _map(fn: Callable[[Tensor], Any], value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind is tuple or kind is list:  # most calls: these three cost a tenth of what pytree does
        return kind([_map(fn, item, depth) for item in value])
    if kind is dict:
        return {key: _map(fn, item, depth) for key, item in value.items()}
    return value if kind in _PLAIN else pytree.tree_map(lambda leaf: _mapped(fn, leaf, depth), value)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor within ``value``, in the order in which ``map_tensors`` meets them."""
    found: list[Tensor] = []
    _list(value, found, _DEPTH)
    return found


def _list(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif (kind := type(value)) is tuple or kind is list:
        for item in value:
            _list(item, found, depth)
    elif kind is dict:
        for item in value.values():
            _list(item, found, depth)
    elif kind not in _PLAIN:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif depth and not isinstance(leaf, (nn.Module, type)) and hasattr(leaf, "__dict__"):
                for item in list(vars(leaf).values()):
                    if _may_hold(item):
                        _list(item, found, depth - 1)


def as_it_is(value: Any, kept: Container[int]) -> Any:
    """``value`` in containers and plain objects of its own, as a model may go on to write to what a module returned; its
    tensors are the very ones.

    ``kept``: ids of what stays the very thing, too.
    """

    def own(item: Any, depth: int) -> Any:
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
        return pytree.tree_map(lambda leaf: own(leaf, depth), item, is_leaf=lambda x: id(x) in kept)

    return within(value, _DEPTH)


def lists_in(value: Any) -> list[list[Any]]:
    """Every list within tuples, lists and dicts, and in plain objects within those, in a fixed order."""
    found: list[list[Any]] = []

    def look(item: Any, depth: int) -> None:
        if isinstance(item, list):
            found.append(item)
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
    return found


def _mapped(fn: Callable[[Tensor], Any], leaf: Any, depth: int) -> Any:
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if depth and not isinstance(leaf, (nn.Module, type)) and hasattr(leaf, "__dict__"):
        for key, item in list(vars(leaf).items()):
            new = _map(fn, item, depth - 1) if _may_hold(item) else item
            if any(a is not b for a, b in zip(pytree.tree_leaves(new), pytree.tree_leaves(item), strict=True)):
                object.__setattr__(leaf, key, new)
    return leaf


def _may_hold(item: Any) -> bool:
    plain = (str, bytes, int, float, complex, bool, type(None), nn.Module, type)
    return not isinstance(item, plain) and not callable(item)
