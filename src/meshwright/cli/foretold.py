"""The steps of a run in time: as they were observed, and the same predicted, each under the plan that it ran under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_DRAWN = 24  # steps of a run that are drawn: a page holds them all


def steps_in_time(
    run: Path, history: History, hardware: str | None, network: str | None, step: int | None = None
) -> tuple[StepInTime, ...]:
    """The steps that were observed, in order; of many, ``worth_drawing``.

    Args:
        run: its folder.
        hardware: the profile to predict for, as ``predict`` takes it; ``network``: likewise.
        step: one that is wanted in any case.

    Raises:
        PlanError: there is no such profile.
    """
    steps = not_foretold(history, step)
    if not steps:
        return ()
    if hardware is not None:
        named_profile(hardware, network)  # who names one hears that there is none
    shown = worth_drawing(history.observed, step)
    plans = {one.plan: one for one in shown}  # most runs have one, and steps of one plan are predicted once
    foretold = {plan: _foretold(run, one, hardware, network) for plan, one in plans.items()}
    return tuple(replace(step, **foretold[one.plan]) for step, one in zip(steps, shown, strict=True))


def not_foretold(history: History, step: int | None = None) -> tuple[StepInTime, ...]:
    """The same without predictions, which take seconds."""
    return tuple(
        StepInTime(one.step, from_plain(Timeline, one.timeline), why="meshwright report predicts it")
        for one in worth_drawing(history.observed, step)
    )


def worth_drawing(observed: Sequence[Observed], step: int | None = None) -> list[Observed]:
    """Of many observed steps the first, the last, the slowest, ``step``, and others at even distances; all, of a few."""
    if len(observed) <= _DRAWN:
        return list(observed)
    slowest = max(range(len(observed)), key=lambda i: float(observed[i].timeline["length"]))
    even = {round(i * (len(observed) - 1) / (_DRAWN - 2)) for i in range(_DRAWN - 1)}
    wanted = {i for i, one in enumerate(observed) if one.step == step}
    return [observed[i] for i in sorted({*even, slowest, *wanted})]


def _foretold(run: Path, observed: Observed, hardware: str | None, network: str | None) -> dict[str, Any]:
    """The fields of a ``StepInTime`` that tell a prediction, or why there is none."""
    try:
        profile = named_profile(hardware, network)
        return {"predicted": _predicted(run, observed, profile), "hardware": profile.name, "why": ""}
    except PlanError as error:
        said = (part for one in error.findings for part in (f"{one.where}: {one.given}", one.fix))
        return {"why": "; ".join(filter(None, said))}


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
