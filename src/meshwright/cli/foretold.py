"""The step of a run in time: as it was observed, and the same predicted, under the plan that it ran under."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli import course as courses
from meshwright.cli.given import pieces_of
from meshwright.cli.subject import LENGTH, batch_of_rows, named_profile, quiet
from meshwright.draw.plain import from_plain
from meshwright.draw.run import StepInTime
from meshwright.draw.timeline import Timeline, timeline
from meshwright.errors import PlanError
from meshwright.plan import Plan
from meshwright.plan.keys import DRAWN
from meshwright.target import HF, TargetLoss, load_target

if TYPE_CHECKING:
    from meshwright.hardware.profile import Profile
    from meshwright.train.history import History, Observed

_FEW = 8  # rows that a made-up batch is made of; where it has more, they repeat


def step_in_time(run: Path, history: History, hardware: str | None, network: str | None) -> StepInTime | None:
    """The step that was observed last; None if none was.

    Args:
        run: its folder.
        hardware: the profile to predict for, as ``predict`` takes it; ``network``: likewise.

    Raises:
        PlanError: there is no such profile.
    """
    step = not_foretold(history)
    if step is None:
        return None
    if hardware is not None:
        named_profile(hardware, network)  # who names one hears that there is none
    try:
        profile = named_profile(hardware, network)
        return replace(step, predicted=_predicted(run, history.observed[-1], profile), hardware=profile.name)
    except PlanError as error:
        return replace(step, why="; ".join(f"{one.where}: {one.given}" for one in error.findings))


def not_foretold(history: History) -> StepInTime | None:
    """The step that was observed last, without a prediction, which takes seconds; None if none was."""
    if not history.observed:
        return None
    last = history.observed[-1]
    return StepInTime(last.step, from_plain(Timeline, last.timeline), why="meshwright report predicts it")


def _predicted(run: Path, observed: Observed, profile: Profile) -> Timeline:
    """The step before it runs, for a profile. Raises PlanError: the target is not what it was, or does not fit the profile."""
    from meshwright.prediction.predict import predict

    same = courses.read(run)
    plan = Plan.from_yaml(observed.plan).replace(weights=DRAWN, verify=0)  # an ordinary step
    target = load_target(same.target, same.settings, rows=min(_FEW, same.global_batch), length=LENGTH)
    made_up = target.dataset is not None or target.spec.startswith(HF)
    batch = batch_of_rows(target.batch, same.global_batch if made_up else None, pieces_of(plan))
    loss = TargetLoss(same.loss) if same.loss else None
    with quiet():
        prediction = predict(target.build, batch, plan, hardware=profile, loss=loss)
    assert prediction.recipe is not None
    return timeline(prediction.recipe, prediction.played)
