"""``compare``: what a second plan of a model takes more or less than a first one, term by term.

    seconds   compute, host, the exposed communication of each axis, waiting for other stages, clip, optimizer
    memory    parameters, gradients, optimizer, activations, … at the peak of the fullest rank

The terms of each plan sum up to its step, and the items to its peak; so the differences of all terms
sum up to the difference of the steps.
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
"""(of the first plan, of the second plan)"""


@dataclass(frozen=True)
class Difference:
    """Two plans of one model, and what they take.

    Attributes:
        plans: the first and the second; ``predictions``: of each.
    """

    plans: tuple[Plan, Plan]
    predictions: tuple[Prediction, Prediction]

    @property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings that the plans say differently: setting → (of the first, of the second); None: left out."""
        first, second = (plan.settings() for plan in self.plans)
        return {
            key: (first.get(key), second.get(key))
            for key in {**first, **second} if first.get(key) != second.get(key)
        }  # fmt: skip

    @property
    def seconds(self) -> dict[str, Pair]:
        """Terms of a step in seconds, of the rank of each plan that ends last."""
        first, second = (prediction.seconds.waterfall for prediction in self.predictions)
        return _pairs(first, second)

    @property
    def memory(self) -> dict[str, Pair]:
        """What lives at the peak in bytes, on the rank of each plan that needs most; the largest first."""
        first, second = (_fullest(prediction).items for prediction in self.predictions)
        pairs = _pairs(first, second)
        return dict(sorted(pairs.items(), key=lambda item: -max(item[1])))

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
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
    """Predicts two plans of one model, for what one takes more or less than the other. From a plain process.

    Args:
        plans: two, each as for ``parallelize``, with its mesh.

    The other arguments are those of ``predict``.

    Raises:
        PlanError: every problem of a plan or of the profile.
        ValueError: other than two plans.
    """
    first, second = map(Plan.parse, plans)
    one, other = (
        predict(build, batch, plan, hardware=hardware, loss=loss, optimizer=optimizer, max_norm=max_norm)
        for plan in (first, second)
    )
    return Difference((first, second), (one, other))


def _fullest(prediction: Prediction) -> Memory:
    return max(prediction.memories.values(), key=lambda memory: memory.peak)


def _pairs(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Pair]:
    """Terms in the order of the first; those of the second alone stand before the terms that follow them there."""
    order, names = list(first), list(second)
    for place, name in enumerate(names):
        if name not in first:
            after = [order.index(other) for other in names[place + 1 :] if other in order]
            order.insert(after[0] if after else len(order), name)
    return {name: (first.get(name, 0), second.get(name, 0)) for name in order}


def _row(pair: Pair) -> dict[str, float]:
    return {"first": pair[0], "second": pair[1], "difference": pair[1] - pair[0]}
