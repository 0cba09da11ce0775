"""``Switch``: something on a model's modules that a person may set between steps; and a model on which it is set.

Planning follows forwards on a model of its own, with shapes alone. If the model that trains was changed between steps, a
forward is recorded anew with the same changes there (``switched``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshwright.private import HOOK_TABLES

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
        kept: in which of its attributes: of itself (``OWN``), in a table of its hooks, or in a dict or object that it keeps.
        key: the name of an attribute, or an item's key.
    """

    module: str
    kept: str
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
    """For the time of a block these switches of a model are set. Tensors and children stay the model's own."""
    modules, before = dict(model.named_modules()), list[tuple[dict[Any, Any], dict[Any, Any]]]()
    try:
        for switch, value in switches.items():
            items = _table(modules.get(switch.module), switch.kept)
            if items is None or isinstance(value, (Tensor, nn.Module)) or (switch.kept, switch.key) == (OWN, "forward"):
                continue
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


def _table(module: nn.Module | None, kept: str) -> dict[Any, Any] | None:
    """What holds an item there."""
    if module is None or kept == CHILDREN:
        return None
    if kept == OWN:
        return vars(module)
    return getattr(module, kept) if kept in HOOK_TABLES else items_of(vars(module).get(kept))
