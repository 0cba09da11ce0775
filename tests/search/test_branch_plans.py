"""Plans with branches: found where they pay, and only there; estimated near their prediction; right when they run."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.hardware.reader import read_profile
from meshwright.prediction.predict import adamw_on
from meshwright.search.choice import chosen_plan
from meshwright.search.find import _may_have_branches
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.result import SearchResult
from meshwright.search.space import Family

A100 = read_profile("a100-80")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Towers(nn.Module):
    """A tower for text and a larger one for images, whose results meet at the end."""

    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.table, self.patch = nn.Embedding(100, width // 2), nn.Linear(48, width)
        self.text = nn.Sequential(*(Block(width // 2) for _ in range(depth)))
        self.image = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width + width // 2, 7)

    def forward(self, ids: Tensor, patches: Tensor, y: Tensor) -> Tensor:
        text, image = self.text(self.table(ids)), self.image(self.patch(patches))
        return nn.functional.cross_entropy(self.head(torch.cat([text.mean(1), image.mean(1)], -1)), y)


def batch(rows: int, tokens: int = 1024) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(0)
    ids, y = (torch.randint(0, size, shape, generator=drawn) for size, shape in ((100, (rows, tokens)), (7, (rows,))))
    return ids, torch.randn(rows, tokens, 48, generator=drawn), y


def loss(output: Tensor) -> Tensor:
    return output


def find(rows: int, devices: int = 2, **options: Any) -> SearchResult:
    return mw.find_plans(Towers, batch(rows), devices=devices, hardware=A100, loss=loss, top=4,
                         options={"precision": "float32", **options})  # fmt: skip


@pytest.fixture(scope="module")
def one_row() -> SearchResult:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a rehearsal repeats no warning of a run
        return find(1)


def test_towers_with_one_row_are_branches(one_row: SearchResult) -> None:
    first, second = one_row.plans
    assert first.plan.settings() == {"mesh": {"tp": 2}, "branches": "auto", "microbatches": 1}
    assert first.estimate.candidate.family == Family(1, 2, branches=True)
    assert second.plan.branches != "auto" and str(second.plan.mesh) == "tp=2"
    assert one_row.why[0].startswith("tp=2 takes ")


def test_a_plan_with_branches_is_estimated_near_its_prediction(one_row: SearchResult) -> None:
    first = one_row.plans[0]
    prediction = mw.predict(Towers, batch(1), first.plan, hardware=A100, loss=loss)
    terms, predicted = first.terms, prediction.seconds.waterfall
    assert len(prediction.roles) == 2
    assert first.nbytes == pytest.approx(prediction.peak, rel=0.1)
    assert first.seconds == pytest.approx(prediction.seconds.seconds, rel=0.2)
    assert terms["compute"] == pytest.approx(predicted["compute"], rel=0.1)
    updated = predicted["clip"] + predicted["optimizer"]
    assert terms["clip and optimizer"] == pytest.approx(updated, rel=0.25)


def test_rows_that_divide_leave_branches_alone_and_a_note_says_so() -> None:
    """Two data ranks have no imbalance, so branches do not pay, also if the plan has ``branches: auto``."""
    found = find(4, branches="auto")
    first = found.plans[0]
    assert not first.estimate.candidate.branches and "branches" not in first.plan.settings()
    assert any(proposal.estimate.candidate.branches for proposal in found.plans)
    assert "branches: some modules could run at the same time, which is estimated to be slower" in found.notes


@pytest.mark.parametrize("options", [{"branches": "said"}, {"sequence_parallel": True}], ids=["said", "sequence"])
def test_no_branches_if_the_options_exclude_them(options: dict[str, Any]) -> None:
    rehearsals = Rehearsals(Towers, batch(4), {}, loss, adamw_on(A100), 1.0, accelerator=True)
    assert not _may_have_branches(rehearsals, [1, 2], options)
    assert _may_have_branches(rehearsals, [1, 2], {}) and not _may_have_branches(rehearsals, [1], {})


class Pulled(Towers):
    """Uses a transform of torch.func that no pipeline and no branches can record."""

    def forward(self, ids: Tensor, patches: Tensor, y: Tensor) -> Tensor:
        pulled, pull = torch.func.vjp(torch.tanh, self.image(self.patch(patches)))
        return pull(torch.ones_like(pulled))[0].mean() + self.text(self.table(ids)).mean() + 0 * y.sum()


def test_a_forward_that_cannot_be_recorded_is_searched_without_branches() -> None:
    found = mw.find_plans(partial(Pulled, 16, 1), batch(4, 8), devices=2, hardware=A100, loss=loss, top=4)
    assert found.plans and not any(proposal.estimate.candidate.branches for proposal in found.plans)


@pytest.mark.proof
def test_mesh_auto_takes_branches(one_row: SearchResult) -> None:
    plan, notes = chosen_plan(
        Towers, batch(1), mw.Plan(mesh="auto", precision="float32"), devices=2, hardware=A100, loss=loss
    )
    assert plan.branches == "auto" and str(plan.mesh) == "tp=2"
    assert "branches: auto" in notes[0]


@pytest.mark.proof
def test_a_found_plan_with_branches_is_one_device(one_row: SearchResult, workers: mw.LocalWorkers) -> None:
    plan = {**one_row.plans[0].plan.settings(), "precision": "float64"}
    assert mw.check(partial(Towers, 16, 2), batch(2, 5), plan, loss=loss, workers=workers).passed
