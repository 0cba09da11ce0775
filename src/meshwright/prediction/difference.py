"""``compare``: how many seconds and bytes more or less a second plan of a model takes than a first plan, term by term.

    seconds   compute, host, the exposed communication of each axis, waiting for other stages, clip, optimizer
    memory    parameters, gradients, optimizer, activations, … at the peak of the rank with the highest peak

The terms of a plan add up to the seconds of its step, and its memory items to its peak. So the differences of all terms add
up to the difference of the steps, and the differences of all items to the difference of the peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.deferred import Build
from meshwright.hardware.profile import Profile
from meshwright.plan import Plan, PlanLike
from meshwright.prediction.memory import Memory
from meshwright.prediction.predict import predict
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.prediction.result import Prediction
from meshwright.runtime.rows.loss import Loss

Pair = tuple[float, float]
"""(value of the first plan, value of the second plan)"""


@dataclass(frozen=True)
class Difference:
    """Two plans of one model, and their predictions.

    Attributes:
        plans: the first and the second plan.
        predictions: of the first and of the second plan.
    """

    plans: tuple[Plan, Plan]
    predictions: tuple[Prediction, Prediction]

    @property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Setting that differs → (its value in the first plan, in the second plan); None: the plan does not set it."""
        first, second = (plan.settings() for plan in self.plans)
        return {
            key: (first.get(key), second.get(key))
            for key in {**first, **second} if first.get(key) != second.get(key)
        }  # fmt: skip

    @property
    def seconds(self) -> dict[str, Pair]:
        """Term → (its seconds in the first plan, in the second plan), on the rank of each plan that ends last."""
        first, second = (prediction.seconds.waterfall for prediction in self.predictions)
        return _pairs(first, second)

    @property
    def memory(self) -> dict[str, Pair]:
        """Kind of memory → (its bytes in the first plan, in the second plan), largest first.

        The bytes live at the peak, on the rank of each plan with the highest peak.
        """
        first, second = (_fullest(prediction).items for prediction in self.predictions)
        pairs = _pairs(first, second)
        return dict(sorted(pairs.items(), key=lambda item: -max(item[1])))

    def json(self) -> dict[str, Any]:
        """The difference as plain values, for a JSON file."""
        return {
            "plans": [plan.dump() for plan in self.plans],
            "settings": {key: list(pair) for key, pair in self.settings.items()},
            "seconds": {term: _row(pair) for term, pair in self.seconds.items()},
            "memory": {item: _row(pair) for item, pair in self.memory.items()},
            "predictions": [prediction.json() for prediction in self.predictions],
        }


def compare(
    build: Build,
    batch: Any,
    plans: Sequence[PlanLike],
    *,
    hardware: str | Profile = "h100",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
) -> Difference:
    """Predicts two plans of one model, and returns their difference. Call it in a plain process, not on a rank of a run.

    Args:
        plans: two plans with their meshes, as for ``parallelize``.

    The other arguments are those of ``predict``.

    Raises:
        PlanError: every problem of a plan or of the profile.
        ValueError: there are not exactly two plans.
    """
    first, second = map(Plan.parse, plans)
    one, other = (
        predict(build, batch, plan, hardware=hardware, loss=loss, optimizer=optimizer, max_norm=max_norm)
        for plan in (first, second)
    )
    return Difference((first, second), (one, other))


def _fullest(prediction: Prediction) -> Memory:
    """The memory of the rank with the highest peak."""
    return max(prediction.memories.values(), key=lambda memory: memory.peak)


def _pairs(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Pair]:
    """Name → (value in ``first``, value in ``second``); 0 if it is missing.

    The order is that of ``first``. A name that only ``second`` has stands before the name that follows it in ``second``.
    """
    order, names = list(first), list(second)
    for position, name in enumerate(names):
        if name not in first:
            following = [order.index(other) for other in names[position + 1 :] if other in order]
            order.insert(following[0] if following else len(order), name)
    return {name: (first.get(name, 0), second.get(name, 0)) for name in order}


def _row(pair: Pair) -> dict[str, float]:
    return {"first": pair[0], "second": pair[1], "difference": pair[1] - pair[0]}
