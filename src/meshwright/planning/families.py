"""Families: a family holds the corresponding parameters of all repeated blocks. Planning decides once for each family.

    layers.0.up.weight  layers.1.up.weight      one family: layers 0 and 1 are repeated blocks
    mlp.fc1.weight      mlp.fc2.weight          two: the digit is part of a name
    net.0.weight        net.2.weight            two: the first and the third step of a Sequential

Repeated blocks are siblings whose names differ in digits only and whose structure is the same: class, names of children,
shapes of parameters. A single layer within a Sequential, or under a name that ends in a digit, is a step of its own; in
a ModuleList, and in a ParameterList, it is one of many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

Structure = tuple[Any, ...]


def families(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Each parameter's name → the name of its family. Corresponding parameters of repeated blocks share one family."""
    finder = _Finder(model)
    return {name: finder.family(name) for name in names}


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.structures: dict[int, Structure] = {}
        self.numbers: dict[Structure, int] = {}  # structures, in the order in which they were met
        self.repeated: dict[int, dict[str, str]] = {}  # id of a module → its repeated children → their common name

    def family(self, name: str) -> str:
        module: Any = self.model
        parts = []
        for part in name.split("."):
            parts.append(self._children(module).get(part, part) if isinstance(module, nn.Module) else part)
            module = getattr(module, part, None)
        return ".".join(parts)

    def _children(self, module: nn.Module) -> dict[str, str]:
        if id(module) not in self.repeated:
            members: dict[str, Any] = {**dict(module.named_parameters(recurse=False)), **dict(module.named_children())}
            alike = {
                part: (_folded(part), self._structure(member))
                for part, member in members.items()
                if re.search(r"\d", part) and _may_repeat(module, part, member)
            }
            counts = Counter(alike.values())
            self.repeated[id(module)] = {
                part: f"{folded}[{self.numbers.setdefault(structure, len(self.numbers))}]"
                for part, (folded, structure) in alike.items()
                if counts[folded, structure] > 1
            }
        return self.repeated[id(module)]

    def _structure(self, member: Any) -> Structure:
        if not isinstance(member, nn.Module):
            return tuple(member.shape)
        if id(member) not in self.structures:
            shapes = tuple((name, tuple(p.shape)) for name, p in member.named_parameters(recurse=False))
            children = tuple((name, self._structure(m)) for name, m in member.named_children())
            self.structures[id(member)] = (type(member), shapes, children)
        return self.structures[id(member)]


def _folded(part: str) -> str:
    return re.sub(r"\d+", "#", part)


def _may_repeat(parent: nn.Module, part: str, member: Any) -> bool:
    """Whether a child may be one of several repeated blocks; else it is a step whose name is a number."""
    if part.isdigit() and not isinstance(parent, nn.Sequential):
        return True
    return isinstance(member, nn.Module) and next(member.children(), None) is not None


__all__ = ["families"]
