"""Folds names of modules and parameters that differ only in numbers into one label.

layers.0.up, layers.1.up, layers.2.up, head ──► layers.{0…2}.up ×3, head
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod


@dataclass(frozen=True)
class Folded:
    """Several names and one label for exactly these: their common text, with ranges in place of numbers."""

    label: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.label


def few(names: Collection[str], most: int = 3) -> str:
    """The first ``most`` names, and the number of further ones: ``a, b, c and 2 more``."""
    return ", ".join([*names][:most]) + f" and {len(names) - most} more" * (len(names) > most)


def fold_names(names: Iterable[str]) -> tuple[Folded, ...]:
    """The folded names, in the order of the first name of each.

    >>> [str(folded) for folded in fold_names(["h.0.attn", "h.1.attn", "head"])]
    ['h.{0…1}.attn', 'head']
    """
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name in order:
        kinds.setdefault(pattern(name), []).append(name)
    folds = [folded for kind in kinds.values() for folded in fold_alike(kind)]
    return tuple(sorted(folds, key=lambda folded: order[folded.names[0]]))


def fold_alike(names: list[str]) -> list[Folded]:
    """Folds names of one pattern. A fold must have every combination of its numbers; else there are several folds."""
    choices = [sorted(set(column)) for column in zip(*map(_numbers, names), strict=True)]
    if prod(map(len, choices)) == len(names):
        return [Folded(_label(names[0], choices), tuple(names))]
    # Some combinations are missing: fold by the first number alone, for each choice of the others.
    ordered = sorted(names, key=lambda name: (_numbers(name)[1:], _numbers(name)))
    groups = groupby(ordered, lambda name: _numbers(name)[1:])
    return [folded for _, group in groups for folded in fold_alike(list(group))]


def by_number(name: str) -> list[tuple[int, str]]:
    """A sort key for names, by which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def pattern(name: str) -> tuple[str, ...]:
    """A name with ``#`` in place of numbers: names with an equal pattern may be folded."""
    return tuple("#" if part.isdigit() else part for part in name.split("."))


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _label(name: str, choices: list[list[int]]) -> str:
    columns = iter(choices)
    return ".".join(_range(next(columns)) if part.isdigit() else part for part in name.split("."))


def _range(numbers: list[int]) -> str:
    """The numbers as a label shows them: ``4``, ``{0…31}``, ``{0,2…30}``, ``{0,1,5}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) > 1 or (len(numbers) == 2 and steps != {1}):
        return "{" + ",".join(map(str, numbers)) + "}"
    return f"{{{numbers[0]}…{numbers[-1]}}}" if steps == {1} else f"{{{numbers[0]},{numbers[1]}…{numbers[-1]}}}"


__all__ = ["Folded", "by_number", "fold_alike", "fold_names", "pattern"]
