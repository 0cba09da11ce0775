"""``ParameterFacts``: the facts of one parameter in a shard map. ``Row``: parameters of repeated blocks, folded into a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.layout import REPLICATE, Layout
from meshwright.names import fold_alike, pattern
from meshwright.recipe import ParameterRecipe, Recipe, Slices, shape_of


@dataclass(frozen=True)
class ParameterFacts:
    """The facts of one parameter.

    Attributes:
        name: its first name.
        aliases: its other names, if it is tied.
        shape, dtype: of the whole parameter.
        layout: axis → layout, in mesh order.
        unit: the module whose parameters FSDP2 gathers together with this one; empty for the root.
        reason: why it is sharded or replicated over tp.
        bytes: of the whole parameter.
        requires_grad: whether it is trained.
        stages: the pipeline stages that use it; stage 0 without a pipeline.
        places: numbers of the submeshes on which it is used: 0 is the trunk, others are branches, as in `Recipe.branches`.
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
        """The layout on an axis. For a parameter of a branch, on that axis of the branch's mesh."""
        return next((layout for name, layout in self.layout.items() if name.split(" ")[0] == axis), REPLICATE)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values, for JSON. Layouts are text."""
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
    """Parameters that differ only in the numbers in their names.

    Attributes:
        label: their common name, with ranges of numbers: ``model.layers.{0…31}.mlp.up_proj.weight``.
        names: of all parameters, in the model's order.
        first: the facts of the first parameter. Those of the others are equal, except for names and stages.
        by_stage: stages of a pipeline → names of the parameters that these stages use.
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
        """Size of all parameters of the row."""
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
    """Number of elements in slices."""
    return prod(shape_of(slices))


def itemsize(dtype: str) -> int:
    """Bytes of an element of a dtype, by its name.

    >>> itemsize("float32"), itemsize("float8_e4m3fn"), itemsize("bool")
    (4, 1, 1)
    """
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def fold(parameters: Iterable[ParameterFacts]) -> tuple[Row, ...]:
    """Folds parameters whose names differ only in numbers, and whose other facts are equal, into one row.

    Numbers are folded only if every combination exists, so that the label determines the names exactly.
    """
    order: dict[str, int] = {}
    kinds: dict[Any, list[ParameterFacts]] = {}
    for facts in parameters:
        order[facts.name] = len(order)
        kinds.setdefault(_kind(facts), []).append(facts)
    rows = [row for kind in kinds.values() for row in _rows(kind)]
    return tuple(sorted(rows, key=lambda row: order[row.names[0]]))


def _kind(facts: ParameterFacts) -> Any:
    """A key that the parameters of one row share."""
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
        facts.stages if len(facts.stages) > 1 else (),  # parameters of one stage each are folded over stages
        facts.places,
    )


def _rows(same_kind: list[ParameterFacts]) -> list[Row]:
    """The rows of parameters of one kind."""
    facts = {f.name: f for f in same_kind}
    rows = []
    for folded in fold_alike(list(facts)):
        by_stage: dict[tuple[int, ...], list[str]] = {}
        for name in folded.names:
            by_stage.setdefault(facts[name].stages, []).append(name)
        stages = {stages: tuple(names) for stages, names in by_stage.items()}
        rows.append(Row(folded.label, folded.names, facts[folded.names[0]], stages))
    return rows
