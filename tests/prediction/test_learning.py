"""A profile is corrected by the measured seconds of steps, each of which is rehearsed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.hardware import read_profile
from meshwright.hardware.correction import corrected
from meshwright.hardware.reader import parse_profile

LAYOUTS = [
    {"mesh": "dp_shard=2"},
    {"mesh": "tp=2"},
    {"mesh": "pp=2", "microbatches": 2},
    {"mesh": "dp_shard=2", "precision": "bfloat16"},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


BATCH = (torch.zeros(64, 256),)


def loss(out: Any) -> Any:
    return out


def seconds(plan: Any, **factors: float) -> float:
    profile = corrected(read_profile("a100"), factors)
    return mw.predict(Net, BATCH, plan, hardware=profile, loss=loss).seconds.seconds


def test_the_host_of_a_cluster_is_learnt_from_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [mw.MeasuredStep(Net, BATCH, plan, seconds(plan, host=1.8), loss=loss) for plan in LAYOUTS]
    rehearsals = []
    from meshwright.prediction import predict

    rehearse = predict.rehearsal_of
    monkeypatch.setattr(predict, "rehearsal_of", lambda *args, **kw: rehearsals.append(args) or rehearse(*args, **kw))
    found = mw.correct_profile(steps, hardware="a100")
    assert len(rehearsals) == len(LAYOUTS)  # one for each step, whatever factors are tried
    assert found.factors.pop("host") == pytest.approx(1.8, rel=0.1)
    assert all(factor == pytest.approx(1, abs=0.15) for factor in found.factors.values())
    assert found.after < 0.02 < found.before


def test_a_corrected_profile_reads_back_and_predicts_what_was_learnt(tmp_path: Any) -> None:
    took = seconds(LAYOUTS[0], host=1.5)
    found = mw.correct_profile([mw.MeasuredStep(Net, BATCH, LAYOUTS[0], took, loss=loss)], hardware="a100")
    assert "corrected: host × 1." in found.profile.notes
    assert parse_profile(found.profile.text(), "lab.yaml") == found.profile
    (tmp_path / "lab.yaml").write_text(found.profile.text())
    said = mw.predict(Net, BATCH, LAYOUTS[0], hardware=str(tmp_path / "lab.yaml"), loss=loss).seconds.seconds
    assert said / took - 1 == pytest.approx(-found.after, abs=1e-3) or said / took - 1 == pytest.approx(
        found.after, abs=1e-3
    )


def test_wrong_seconds_are_told_together() -> None:
    steps = [mw.MeasuredStep(Net, BATCH, LAYOUTS[0], wrong, loss=loss) for wrong in (0.0, 0.1, float("nan"))]
    with pytest.raises(PlanError) as raised:
        mw.correct_profile(steps)
    assert "steps[0].seconds" in str(raised.value) and "steps[2].seconds" in str(raised.value)
    with pytest.raises(PlanError, match=r"steps\[0\]\.scatter"):
        mw.correct_profile([mw.MeasuredStep(Net, BATCH, LAYOUTS[0], 0.1, scatter=-0.1, loss=loss)])
    with pytest.raises(PlanError, match="at least one measured step"):
        mw.correct_profile([])
