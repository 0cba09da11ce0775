"""``correct_profile``: corrects a hardware profile by the measured seconds of training steps, wherever they ran.

steps ──► each rehearsed once                          predict.py
factors of the profile's parts ──► seconds of each     its costs on the corrected profile
        ──► the most probable factors                  hardware/correction.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.deferred import Build
from meshwright.errors import Findings
from meshwright.hardware.correction import Correction, Part, corrected, learnt
from meshwright.hardware.profile import Estimate, Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import PlanLike
from meshwright.prediction.predict import RehearsedPlan
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.runtime.rows.loss import Loss


@dataclass(frozen=True)
class MeasuredStep:
    """A training step, and how long it took.

    Attributes:
        seconds: of the step: forwards, backwards, clipping and the optimizer. The median of some steps after the third.
        scatter: the standard deviation of these steps' seconds, as a fraction of the median.

    The other attributes are the arguments of ``predict``.
    """

    build: Build
    batch: Any
    plan: PlanLike
    seconds: float
    scatter: float = 0.0
    loss: Loss | None = None
    optimizer: MakeOptimizer | None = None
    max_norm: float | None = 1.0


def correct_profile(steps: Sequence[MeasuredStep], *, hardware: str | Profile = "h100") -> Correction:
    """Corrects a profile by the measured seconds of training steps: ``.profile`` is for the next ``predict`` or ``find_plans``.

        steps = [MeasuredStep(Model, batch, {"mesh": "dp_shard=8"}, seconds=0.41),
                 MeasuredStep(Model, batch, {"mesh": "dp_shard=4,tp=2"}, seconds=0.52)]
        correction = correct_profile(steps, hardware="a100")  # .factors: {"host": 1.8}
        Path("our_a100.yaml").write_text(correction.profile.text())

    Five factors are learnt: of products, of memory, of the host, and of the links within and between nodes
    (``hardware.correction``). Steps of several layouts and sizes tell these parts apart; steps that scatter count less. Call it
    in a plain process, not on a rank of a run. It rehearses each step once, as ``predict`` does.

    Args:
        steps: at least one.
        hardware: the profile of the devices that ran the steps, its name (``h100``), or the path of its YAML file.

    Raises:
        PlanError: there are no steps, seconds are not above 0, a scatter is below 0, or every problem of a plan or of the
            profile.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    _check(steps)
    rehearsed = [
        RehearsedPlan.of(step.build, step.batch, step.plan, profile, step.loss, step.optimizer, step.max_norm)
        for step in steps
    ]

    def predict(factors: Mapping[Part, float]) -> list[float]:
        other = corrected(profile, factors)
        return [step.seconds(other).seconds for step in rehearsed]

    return learnt(profile, predict, [Estimate(step.seconds, step.scatter) for step in steps])


def _check(steps: Sequence[MeasuredStep]) -> None:
    """Raises PlanError with every problem of the measured seconds and their scatter."""
    findings = Findings("these steps")
    if not steps:
        findings.add(where="steps", given="none", required="at least one measured step", fix="[MeasuredStep(…)]")
    for number, step in enumerate(steps):
        if not 0 < step.seconds < float("inf"):
            findings.add(
                where=f"steps[{number}].seconds",
                given=str(step.seconds),
                required="seconds above 0",
                fix="seconds=0.41",
            )
        if not 0 <= step.scatter < float("inf"):
            findings.add(
                where=f"steps[{number}].scatter",
                given=str(step.scatter),
                required="a fraction of the seconds, at least 0",
                fix="scatter=0.05",
            )
    findings.raise_if_any()
