"""``Communication``: the collectives of a step, by axis and module; and the functions that ran whole.

from a plan alone      the weights that each unit gathers over the data axes, and the values that each stage sends
from a prediction      every collective of the rehearsed rank of each role, counted
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
        role: name of the role whose ranks enter them; empty for a plan alone.
        axis: of the mesh; the axes of one group are joined, ``dp_replicate·dp_shard``.
        kind: all_gather, reduce_scatter, …; for a plan alone, what is exchanged.
        module: the module whose forward calls them, with ``*`` for numbers of blocks; else the direction (``backward``)
            or the phase of the step (``clip``).
        calls: number in a step; 0 if it is not known.
        bytes: size of the full tensors: that are reduced, or that all ranks have gathered.
    """

    role: str
    axis: str
    kind: str
    module: str
    calls: float
    bytes: float


@dataclass(frozen=True)
class UnshardedFunction:
    """A function that no decider can shard: its inputs are gathered, and it runs on full tensors.

    Attributes:
        function: its name.
        module: that calls it.
        line: of the model's source.
    """

    function: str
    module: str
    line: str


@dataclass(frozen=True)
class Communication:
    """The exchanges of a step.

    Attributes:
        source: ``plan`` or ``prediction``.
        exchanges: all of them.
        ran_whole: functions that ran whole; known from a prediction only.
    """

    source: str
    exchanges: tuple[Exchange, ...]
    ran_whole: tuple[UnshardedFunction, ...] = ()


def communication(recipe: Recipe, prediction: Prediction | None = None) -> Communication:
    """The exchanges of a step.

    Args:
        recipe: of the plan.
        prediction: of the same plan; None for a plan alone.
    """
    if prediction is None:
        return Communication("plan", (*_gathered_units(recipe), *_stage_transfers(recipe)))
    exchanges = tuple(
        Exchange(role.name, exchange.axis, exchange.kind, exchange.module, exchange.calls, exchange.nbytes)
        for role in prediction.roles
        for exchange in prediction.exchanges.get(role.rank, ())
    )
    return Communication("prediction", exchanges, tuple(UnshardedFunction(*fields) for fields in prediction.ran_whole))


def _gathered_units(recipe: Recipe) -> list[Exchange]:
    """The units that FSDP2 gathers, repeated ones folded, with the bytes of their weights on one tp rank."""
    sizes: dict[str, int] = {}
    for line in recipe.parameters:
        if recipe.shards(line) > 1:
            sizes[line.unit] = sizes.get(line.unit, 0) + _bytes(line)
    return [
        Exchange("", "dp_shard", GATHERED, folded.label or "the rest of the model", 0, sum(sizes[n] for n in folded.names))
        for folded in fold_names(sizes)
    ]  # fmt: skip


def _bytes(line: ParameterRecipe) -> int:
    """Bytes of a parameter on the tp rank with the largest shard."""
    elements = 1
    for size in line.local_shape(0):
        elements *= size
    return elements * itemsize(line.dtype)


def _stage_transfers(recipe: Recipe) -> list[Exchange]:
    """The values that each stage sends to the next."""
    return [
        Exchange("", "pp", HANDED_ON, f"stage {stage.index}", 0, stage.sends) for stage in recipe.stages if stage.sends
    ]
