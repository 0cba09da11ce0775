"""``Report``: everything there is to see of a plan, as plain data; renderers (``html``) only draw it.

    recipe ─────► shards (``facts``), timeline, memory, communication       a plan alone: no process, any world size
    prediction ─► the same in seconds and bytes, and the terms of a step    with a profile of the hardware
    job ────────► mismatches                                                what ranks really hold, where it differs

``to_json`` and ``from_json`` are each other's inverse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from meshwright.draw.communication import Communication, communication
from meshwright.draw.facts import ShardMap, shard_map
from meshwright.draw.memory import MemoryProfile, memory_profile
from meshwright.draw.plain import from_plain, to_plain
from meshwright.draw.timeline import Timeline, timeline
from meshwright.mismatch import Mismatch
from meshwright.recipe import Recipe

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.result import Prediction


@dataclass(frozen=True)
class Step:
    """What a step takes under a plan, predicted or measured.

    Attributes:
        name: of the plan; ``mesh``, ``hardware``: as text; ``source``: ``predicted`` or ``measured``.
        seconds: (mean, low, high).
        terms: of the mean, on the rank that ends last, in seconds.
        peak: bytes on the rank that needs most; ``capacity``: of a device; ``fits``: whether all ranks fit.
    """

    name: str
    mesh: str
    hardware: str
    source: str
    seconds: tuple[float, float, float]
    terms: Mapping[str, float]
    peak: int
    capacity: int
    fits: bool


@dataclass(frozen=True)
class Report:
    """Everything there is to see of a plan.

    Attributes:
        title: what the plan is of.
        steps: what a step takes: this plan's, then those of plans to compare with; empty without a prediction.
        mismatches: what ranks of a job hold otherwise than the recipe says: an alarm. None where no job was looked at.
        per_node: ranks of a node; 0 where it is not known.
    """

    title: str
    recipe: Recipe
    timeline: Timeline
    memory: MemoryProfile
    communication: Communication
    steps: tuple[Step, ...] = ()
    mismatches: tuple[Mismatch, ...] | None = None
    notes: tuple[str, ...] = ()
    per_node: int = 0

    @cached_property
    def shards(self) -> ShardMap:
        """Which rank holds what."""
        return shard_map(self.recipe)

    @property
    def sound(self) -> bool:
        """Whether no rank of a job was found to hold something else than the recipe says."""
        return not self.mismatches

    def html(self) -> str:
        """All of it as one HTML file, which a browser opens from disk."""
        from meshwright.draw.html.page import page  # jinja2 is loaded where a page is made

        return page(self)

    def _repr_html_(self) -> str:
        frame = "width:100%;height:720px;border:1px solid #8888;border-radius:8px"
        return f'<iframe sandbox="allow-scripts" style="{frame}" srcdoc="{escape(self.html())}"></iframe>'

    def to_json(self) -> str:
        """All of it, also what was worked out."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that ``to_json`` gave."""
        return from_plain(cls, json.loads(text))


def report(
    shards: ShardMap | Recipe | Prediction,
    prediction: Prediction | None = None,
    *,
    title: str = "",
    others: Mapping[str, Prediction] | None = None,
    mismatches: Sequence[Mismatch] | None = None,
) -> Report:
    """Everything there is to see of a plan.

    Args:
        shards: of a plan alone (``make_recipe``), or of a job; or a prediction, which has its recipe.
        prediction: of the same plan.
        title: what the plan is of.
        others: of other plans of the model, by name, to compare with.
        mismatches: what ranks of a job hold otherwise than the recipe says.

    Raises:
        ValueError: a prediction without a recipe: what was measured.
    """
    if not isinstance(shards, (Recipe, ShardMap)):
        return report(_recipe_of(shards), shards, title=title, others=others, mismatches=mismatches)
    if isinstance(shards, Recipe):
        shards = shard_map(shards)
    recipe = shards.recipe
    named = {} if prediction is None else {"this plan": prediction}
    predictions = {**named, **(others or {})}
    return Report(
        title or "a model",
        recipe,
        timeline(recipe, None if prediction is None else prediction.played),
        memory_profile(shards, prediction),
        communication(recipe, prediction),
        tuple(_step(name, one) for name, one in predictions.items()),
        None if mismatches is None else tuple(mismatches),
        recipe.notes if prediction is None else prediction.notes,
        0 if prediction is None else prediction.per_node,
    )


def _recipe_of(prediction: Prediction) -> Recipe:
    if prediction.recipe is None:
        raise ValueError("what was measured has no recipe: report(recipe) of make_recipe, or report(predict(...))")
    return prediction.recipe


def _step(name: str, prediction: Prediction) -> Step:
    seconds = prediction.seconds
    return Step(
        name, prediction.mesh, prediction.hardware, prediction.source, (seconds.seconds, seconds.low, seconds.high),
        dict(seconds.waterfall), prediction.peak, prediction.capacity, prediction.fits,
    )  # fmt: skip
