"""Timelines of a run's observed steps, each beside the prediction for the plan that the step ran under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli import run_folder
from meshwright.cli.run_steps import RunStep, plan_of_steps
from meshwright.cli.subject import named_profile, without_warnings
from meshwright.draw.plain import from_plain
from meshwright.draw.run import StepInTime
from meshwright.draw.timeline import Timeline, timeline
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.hardware.profile import Profile
    from meshwright.train.history import History, ObservedStep

_DRAWN = 24  # most steps that are drawn: one HTML page holds them all


def steps_in_time(
    run: Path, history: History, hardware: str | None, network: str | None, step: int | None = None
) -> tuple[StepInTime, ...]:
    """The observed steps that ``worth_drawing`` selects, in order, each with its prediction.

    Args:
        run: the folder of the run.
        history: what the run's files tell.
        hardware: the profile to predict for, as ``predict`` takes it.
        network: the network of that profile, as ``predict`` takes it.
        step: a step to include in any case.

    Raises:
        PlanError: ``hardware`` names no profile, or ``network`` none of its networks.
    """
    steps = without_predictions(history, step)
    if not steps:
        return ()
    if hardware is not None:
        named_profile(hardware, network)  # raises if a name is wrong; without a name, a missing profile is no error
    selected = worth_drawing(history.observed, step)
    first_of_plan = {observed.plan: observed for observed in selected}  # steps of one plan are predicted once
    predictions = {
        plan: _prediction_fields(run, observed, hardware, network) for plan, observed in first_of_plan.items()
    }
    return tuple(
        replace(in_time, **predictions[observed.plan]) for in_time, observed in zip(steps, selected, strict=True)
    )


def without_predictions(history: History, step: int | None = None) -> tuple[StepInTime, ...]:
    """The observed steps that ``worth_drawing`` selects, without predictions, which take seconds."""
    return tuple(
        StepInTime(observed.step, from_plain(Timeline, observed.timeline), why="meshwright report predicts it")
        for observed in worth_drawing(history.observed, step)
    )


def worth_drawing(observed: Sequence[ObservedStep], step: int | None = None) -> list[ObservedStep]:
    """Selects about ``_DRAWN`` of the observed steps: the first, the last, the slowest, ``step``, and others at even
    distances. All of them, if there are no more than ``_DRAWN``."""
    if len(observed) <= _DRAWN:
        return list(observed)
    slowest = max(range(len(observed)), key=lambda i: float(observed[i].timeline["length"]))
    evenly_spaced = {round(i * (len(observed) - 1) / (_DRAWN - 2)) for i in range(_DRAWN - 1)}
    asked_for = {i for i, one in enumerate(observed) if one.step == step}
    return [observed[i] for i in sorted({*evenly_spaced, slowest, *asked_for})]


def _prediction_fields(run: Path, observed: ObservedStep, hardware: str | None, network: str | None) -> dict[str, Any]:
    """The fields of a ``StepInTime`` that hold its prediction; or ``why``, if there is none."""
    try:
        profile = named_profile(hardware, network)
        return {"predicted": _predicted(run, observed, profile), "hardware": profile.name, "why": ""}
    except PlanError as error:
        parts = (part for finding in error.findings for part in (f"{finding.where}: {finding.given}", finding.fix))
        return {"why": "; ".join(filter(None, parts))}


def _predicted(run: Path, observed: ObservedStep, profile: Profile) -> Timeline:
    """The predicted timeline of an observed step on a profile.

    Raises:
        PlanError: the target cannot be loaded any more, or the plan does not fit the profile.
    """
    from meshwright.prediction.predict import predict

    step = RunStep.of(run_folder.read_identity(run), plan_of_steps(observed.plan))
    with without_warnings():
        prediction = predict(step.target.build, step.batch, step.plan, hardware=profile, loss=step.loss)
    assert prediction.recipe is not None
    return timeline(prediction.recipe, prediction.played)
