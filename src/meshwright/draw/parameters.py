"""``ParameterFacts``: what a shard map says of one parameter; and ``Row``, those of repeated blocks, folded into one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.layout import REPLICATE, Layout
from meshwright.names import fold_alike, pattern
from meshwright.recipe import ParameterRecipe, Recipe, Slices


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter.

    Attributes:
        name, aliases: all its names; tied ones are aliases.
        shape, dtype: of the whole parameter.
        layout: on each axis of the mesh, in mesh order.
        unit: the module whose parameters are gathered with it; empty for the root.
        reason: why it is cut as it is, or left whole.
        bytes: of the whole parameter.
        requires_grad: whether it is trained.
        stages: the pipeline stages that use it; without a pipeline stage 0.
        places: where it is used: 0 is the trunk, others are branches, as `Recipe.branches` numbers them from 1 on.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Mapping[str, Layout]
    unit: str
    reason: str
    bytes: int
    requires_grad: bool
    stages: tuple[int, ...] = (0,)
    places: tuple[int, ...] = (0,)

    def on_axis(self, axis: str) -> Layout:
        """The layout on an axis; of a parameter of a branch, on that axis of its place."""
        return next((layout for name, layout in self.layout.items() if name.split(" ")[0] == axis), REPLICATE)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; layouts as words."""
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": {axis: str(layout) for axis, layout in self.layout.items()},
            "unit": self.unit,
            "reason": self.reason,
            "bytes": self.bytes,
            "requires_grad": self.requires_grad,
            "stages": list(self.stages),
            "places": list(self.places),
        }


@dataclass(frozen=True)
class Row:
    """Parameters that differ in nothing but the numbers in their names.

    Attributes:
        label: their name, with the ranges of the numbers: ``model.layers.{0…31}.mlp.up_proj.weight``.
        names: all of them, in the model's order.
        first: the facts of the first, which are those of all, but for the stage.
        by_stage: stages of a pipeline → the names that these stages use.
    """

    label: str
    names: tuple[str, ...]
    first: ParameterFacts
    by_stage: Mapping[tuple[int, ...], tuple[str, ...]]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def bytes(self) -> int:
        """Of all of them together."""
        return self.count * self.first.bytes

    def __str__(self) -> str:
        return self.label if self.count == 1 else f"{self.label} ×{self.count}"


def facts_of(line: ParameterRecipe, recipe: Recipe) -> ParameterFacts:
    return ParameterFacts(
        name=line.name,
        aliases=line.aliases,
        shape=line.shape,
        dtype=line.dtype,
        layout=recipe.layouts(line),
        unit=line.unit,
        reason=line.reason,
        bytes=line.numel * itemsize(line.dtype),
        requires_grad=line.requires_grad,
        stages=line.stages,
        places=line.places,
    )


def elements(slices: Slices) -> int:
    """How many elements the ranges hold."""
    return prod(sum(stop - start for start, stop in ranges) for ranges in slices)


def itemsize(dtype: str) -> int:
    """Bytes of an element: of ``float32`` 4, of ``float8_e4m3fn`` 1, of ``bool`` 1."""
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def fold(parameters: Iterable[ParameterFacts]) -> tuple[Row, ...]:
    """Parameters whose names differ in whole numbers only, and that are alike in all else, as one row each.

    Numbers are folded only where every combination is there: the label then says exactly which names it stands for.
    """
    order: dict[str, int] = {}
    kinds: dict[Any, list[ParameterFacts]] = {}
    for facts in parameters:
        order[facts.name] = len(order)
        kinds.setdefault(_kind(facts), []).append(facts)
    rows = [row for kind in kinds.values() for row in _rows(kind)]
    return tuple(sorted(rows, key=lambda row: order[row.names[0]]))


def _kind(facts: ParameterFacts) -> Any:
    """What parameters of one row share."""
    names = tuple(pattern(name) for name in (facts.name, *facts.aliases))
    layout = tuple(facts.layout.values())
    return (
        names,
        pattern(facts.unit),
        facts.shape,
        facts.dtype,
        layout,
        facts.reason,
        facts.requires_grad,
        facts.stages if len(facts.stages) > 1 else (),  # stages that do the same are told once
        facts.places,
    )


def _rows(alike: list[ParameterFacts]) -> list[Row]:
    facts = {f.name: f for f in alike}
    rows = []
    for folded in fold_alike(list(facts)):
        by_stage: dict[tuple[int, ...], list[str]] = {}
        for name in folded.names:
            by_stage.setdefault(facts[name].stages, []).append(name)
        stages = {stages: tuple(names) for stages, names in by_stage.items()}
        rows.append(Row(folded.label, folded.names, facts[folded.names[0]], stages))
    return rows
