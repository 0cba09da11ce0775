"""Steps of a training run, as ``predict`` and ``correct_profile`` take them: the run's target, with a plan of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from meshwright.cli import run_folder
from meshwright.cli.inputs import pieces_of
from meshwright.cli.run_folder import RunIdentity
from meshwright.cli.subject import DISTINCT_ROWS, LENGTH, batch_of_rows
from meshwright.errors import Findings
from meshwright.plan import Plan
from meshwright.plan.keys import DRAWN
from meshwright.target import HF, Target, TargetLoss, load_target

if TYPE_CHECKING:
    from meshwright.prediction.learning import MeasuredStep
    from meshwright.train.history import History

_FIRST = 3  # steps after a start that are not counted: they record, compile and allocate


@dataclass(frozen=True)
class RunStep:
    """A step of a run, to predict.

    Attributes:
        target: of the run.
        batch: a global batch of the run: as many rows as its steps had.
        plan: of the step.
        loss: of the run.
    """

    target: Target
    batch: Any
    plan: Plan
    loss: TargetLoss | None

    @staticmethod
    def of(identity: RunIdentity, plan: Plan) -> RunStep:
        """Loads the target of a run again. Raises PlanError if it cannot be loaded any more."""
        rows = min(DISTINCT_ROWS, identity.global_batch)
        target = load_target(identity.target, identity.settings, rows=rows, length=LENGTH)
        has_generated_batch = target.dataset is not None or target.spec.startswith(HF)
        batch = batch_of_rows(target.batch, identity.global_batch if has_generated_batch else None, pieces_of(plan))
        return RunStep(target, batch, plan, TargetLoss(identity.loss) if identity.loss else None)


def plan_of_steps(text: str) -> Plan:
    """The plan of a run's steps, from its YAML, without what does not change the seconds of a step: loaded weights, and the
    comparison of replicas."""
    return Plan.from_yaml(text).replace(weights=DRAWN, verify=0)


def measured_steps(folder: Path) -> list[MeasuredStep]:
    """A measured step for each plan of a run: the median of its steps' seconds, with their scatter.

    The first ``_FIRST`` steps after each start are left out, and those in which ranks were compared or that were observed.

    Raises:
        PlanError: the folder is no run's, no step can be counted, or the target cannot be loaded any more.
    """
    from meshwright.prediction.learning import MeasuredStep
    from meshwright.train.history import history

    run = history(folder)
    seconds: dict[str, list[float]] = {}
    for plan, took in _timed(run):
        seconds.setdefault(plan_of_steps(plan).dump(), []).append(took)
    _check(folder, run, seconds)
    identity = run_folder.read_identity(folder)
    steps = [(RunStep.of(identity, Plan.from_yaml(plan)), took) for plan, took in seconds.items()]
    return [
        MeasuredStep(step.target.build, step.batch, step.plan, median(took), _scatter(took), loss=step.loss)
        for step, took in steps
    ]


def _timed(run: History) -> Iterator[tuple[str, float]]:
    """(plan, seconds) of each step that counts."""
    others = {observed.step for observed in run.observed} | {comparison.step for comparison in run.comparisons}
    plans = {start.step: start.plan for start in run.starts}
    first, plan = 0, None
    for step, took in zip(run.steps, run.series.get("seconds", ()), strict=False):
        if step in plans:
            first, plan = step, plans[step]
        if plan is not None and took and step - first >= _FIRST and step not in others:
            yield plan, took


def _scatter(seconds: Sequence[float]) -> float:
    """The standard deviation of some steps' seconds, as a fraction of their median."""
    mean = fmean(seconds)
    return sqrt(fmean((one - mean) ** 2 for one in seconds)) / median(seconds)


def _check(folder: Path, run: History, seconds: dict[str, list[float]]) -> None:
    """Raises PlanError if no step of a run can be counted."""
    findings = Findings("this command")
    if not run.starts:
        findings.add(
            where=str(folder), given="no starts.jsonl: a version before wrote this run",
            required="the plan of the run's steps", fix="run some more steps: meshwright train … --steps",
        )  # fmt: skip
    elif not seconds:
        findings.add(
            where=str(folder), given=f"{len(run.steps)} steps",
            required=f"steps after the first {_FIRST} of a start, in which ranks were not compared",
            fix=f"--steps {len(run.steps) + 2 * _FIRST}",
        )  # fmt: skip
    findings.raise_if_any()
