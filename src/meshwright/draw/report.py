"""``Report``: all facts about a plan that can be drawn, as plain data. Renderers (``html``) only draw it.

    recipe ─────► shards (``facts``), timeline, memory, communication       from a plan alone: no process, any world size
    prediction ─► these in seconds and bytes, and the terms of a step       with a hardware profile
    job ────────► mismatches                                                shards on ranks that differ from the recipe

``from_json`` is the inverse of ``to_json``.
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
from meshwright.draw.topology import Topology, topology
from meshwright.mismatch import Mismatch
from meshwright.recipe import Recipe

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.result import Prediction


@dataclass(frozen=True)
class StepCosts:
    """Time and memory of a step under a plan, predicted or measured.

    Attributes:
        name: of the plan.
        mesh, hardware: as text.
        source: ``predicted`` or ``measured``.
        seconds: (mean, low, high).
        terms: name → seconds; they add up to the mean, on the rank that ends last.
        peak: bytes on the rank that needs the most.
        capacity: bytes of a device.
        fits: whether every rank fits its device.
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
    """All facts about a plan that can be drawn.

    Attributes:
        title: name of the model or the run.
        recipe: every decision of the plan.
        timeline, memory, communication: facts of a step.
        steps: time and memory of a step: of this plan, then of plans to compare with; empty without a prediction.
        mismatches: shards that differ from the recipe, which is an alarm. None if no job was checked.
        notes: texts for a reader.
        per_node: number of ranks of a node; 0 if it is not known.
    """

    title: str
    recipe: Recipe
    timeline: Timeline
    memory: MemoryProfile
    communication: Communication
    steps: tuple[StepCosts, ...] = ()
    mismatches: tuple[Mismatch, ...] | None = None
    notes: tuple[str, ...] = ()
    per_node: int = 0

    @cached_property
    def shards(self) -> ShardMap:
        """Which rank holds what."""
        return shard_map(self.recipe)

    @cached_property
    def topology(self) -> Topology | None:
        """The nodes of the mesh, and which axes communicate between them. None if they are not known."""
        return topology(self.recipe.mesh, self.per_node) if self.per_node else None

    @property
    def sound(self) -> bool:
        """Whether no mismatch is known."""
        return not self.mismatches

    def html(self) -> str:
        """The report as one HTML file, which a browser opens from disk."""
        from meshwright.draw.html.page import page  # imported here, as jinja2 is needed for pages only

        return page(self)

    def _repr_html_(self) -> str:
        frame = "width:100%;height:720px;border:1px solid #8888;border-radius:8px"
        return f'<iframe sandbox="allow-scripts" style="{frame}" srcdoc="{escape(self.html())}"></iframe>'

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report from the text of ``to_json``."""
        return from_plain(cls, json.loads(text))


def report(
    shards: ShardMap | Recipe | Prediction,
    prediction: Prediction | None = None,
    *,
    title: str = "",
    others: Mapping[str, Prediction] | None = None,
    mismatches: Sequence[Mismatch] | None = None,
    per_node: int = 0,
) -> Report:
    """Collects the facts of a plan.

    Args:
        shards: a recipe (``make_recipe``) or its shard map; or a prediction, which has its recipe.
        prediction: of the same plan.
        title: name of the model or the run.
        others: name → prediction of another plan of the model, to compare with.
        mismatches: shards on ranks of a job that differ from the recipe.
        per_node: number of ranks on a node, if there is no prediction, which knows it. 0: not known.

    Raises:
        ValueError: the prediction has no recipe, since it was measured.
    """
    if not isinstance(shards, (Recipe, ShardMap)):
        return report(_recipe_of(shards), shards, title=title, others=others, mismatches=mismatches, per_node=per_node)
    if isinstance(shards, Recipe):
        shards = shard_map(shards)
    recipe = shards.recipe
    this_plan = {} if prediction is None else {"this plan": prediction}
    predictions = {**this_plan, **(others or {})}
    return Report(
        title or "a model",
        recipe,
        timeline(recipe, None if prediction is None else prediction.played),
        memory_profile(shards, prediction),
        communication(recipe, prediction),
        tuple(_step(name, one) for name, one in predictions.items()),
        None if mismatches is None else tuple(mismatches),
        recipe.notes if prediction is None else prediction.notes,
        per_node if prediction is None else prediction.per_node,
    )


def _recipe_of(prediction: Prediction) -> Recipe:
    if prediction.recipe is None:
        raise ValueError("a measured step has no recipe: call report(make_recipe(...)) or report(predict(...))")
    return prediction.recipe


def _step(name: str, prediction: Prediction) -> StepCosts:
    seconds = prediction.seconds
    return StepCosts(
        name, prediction.mesh, prediction.hardware, prediction.source, (seconds.seconds, seconds.low, seconds.high),
        dict(seconds.waterfall), prediction.peak, prediction.capacity, prediction.fits,
    )  # fmt: skip
