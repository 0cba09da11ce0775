"""``Communication``: what ranks exchange in a step, by axis and module; and what ran whole. Facts before ink.

of a plan alone      what each unit gathers over the data axes, and what each stage hands on: what the recipe says
of a prediction      every collective that the rehearsed rank of each role enters, counted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.draw.parameters import itemsize
from meshwright.names import fold_names
from meshwright.recipe import ParameterRecipe, Recipe

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.result import Prediction

GATHERED, HANDED_ON = "weights of a unit", "values handed on"


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind.

    Attributes:
        role: whose ranks enter them, by name; empty where a plan alone is known.
        axis: of the mesh; several that one group lies along are joined, ``dp_replicate·dp_shard``.
        kind: all_gather, reduce_scatter, …; of a plan alone, what is exchanged.
        module: whose forward asks for them, with ``*`` for the numbers of blocks; else the direction
            (``backward``) or the phase of the step (``clip``).
        calls: in a step; 0 where it is not known.
        bytes: of the whole tensors: what is reduced, or what all ranks have gathered.
    """

    role: str
    axis: str
    kind: str
    module: str
    calls: float
    bytes: float


@dataclass(frozen=True)
class RanWhole:
    """A function without a rule for its shards: its inputs are gathered, and it runs whole. ``line``: of the model."""

    function: str
    module: str
    line: str


@dataclass(frozen=True)
class Communication:
    """What is exchanged. ``source``: ``plan`` or ``prediction``."""

    source: str
    exchanges: tuple[Exchange, ...]
    ran_whole: tuple[RanWhole, ...] = ()


def communication(recipe: Recipe, prediction: Prediction | None = None) -> Communication:
    """What ranks exchange in a step. ``prediction``: of the same plan."""
    if prediction is None:
        return Communication("plan", (*_gathered(recipe), *_handed_on(recipe)))
    exchanges = tuple(
        Exchange(role.name, one.axis, one.kind, one.module, one.calls, one.nbytes)
        for role in prediction.roles
        for one in prediction.exchanges.get(role.rank, ())
    )
    return Communication("prediction", exchanges, tuple(RanWhole(*place) for place in prediction.ran_whole))


def _gathered(recipe: Recipe) -> list[Exchange]:
    """The units that FSDP2 gathers, alike ones as one: bytes of all their weights, as one tp rank has them."""
    sizes: dict[str, int] = {}
    for line in recipe.parameters:
        if recipe.shards(line) > 1:
            sizes[line.unit] = sizes.get(line.unit, 0) + _bytes(line)
    return [
        Exchange("", "dp_shard", GATHERED, folded.label or "the rest of the model", 0, sum(sizes[n] for n in folded.names))
        for folded in fold_names(sizes)
    ]  # fmt: skip


def _bytes(line: ParameterRecipe) -> int:
    """Of what the tp rank with the largest share has of a parameter."""
    elements = 1
    for size in line.local_shape(0):
        elements *= size
    return elements * itemsize(line.dtype)


def _handed_on(recipe: Recipe) -> list[Exchange]:
    return [
        Exchange("", "pp", HANDED_ON, f"stage {stage.index}", 0, stage.sends) for stage in recipe.stages if stage.sends
    ]
