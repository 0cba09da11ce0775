"""Branches, and tensors whose sizes follow from values: a mask of the batch picks tokens, other ones in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.workers.pool import LocalWorkers

WIDTH = 6
PLANS: dict[str, dict[str, Any]] = {
    "two": {"mesh": "tp=2", "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:2]"}}},
    "uneven": {"mesh": "tp=3", "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:3]", "tp": "column"}}},
    "data": {"mesh": "dp_shard=2,tp=2", "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:2]"}}},
}


class Masked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        picked = h[mask]
        if self.kind == "into a branch":
            return {"loss": self.left(h).square().mean() + self.right(picked).square().sum()}
        if self.kind == "into both, and out":
            return {"loss": (self.left(picked) + self.right(picked)).square().sum()}
        if self.kind == "decides":
            h = h * self.scale if len(picked) > 9 else h
        if self.kind == "of the model":
            picked = h[h > 0].unsqueeze(-1) * self.scale
            return {"loss": self.left(picked).square().sum() + self.right(h).square().sum()}
        return {"loss": self.left(h).square().sum() + self.right(h).square().sum()}


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    mask = torch.rand(4, 5, generator=draw) < 0.3 + 0.2 * step  # in each row something is picked
    mask[:, 0] = True
    return {"x": torch.randn(4, 5, WIDTH, generator=draw, dtype=torch.float64), "mask": mask}


def trained(kind: str, plan: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    job = mw.parallelize(lambda: Masked(kind).double(), plan, batch=batch(0))
    optimizer, losses = torch.optim.SGD(job.parameters(), lr=0.01), []
    rows = len(batch(0)["x"]) // job.recipe.mesh.data_size
    start = job.recipe.mesh.data_index(job.rank) * rows
    for step in range(3):
        losses.append(job.step({name: t[start : start + rows] for name, t in batch(step).items()}).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {p.name: value for p, value in job.full_parameters()}


OFTEN = {("into a branch", "two"), ("into both, and out", "uneven"), ("decides", "two")}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, marks=[] if (kind, plan) in OFTEN else [pytest.mark.proof], id=f"{kind}-{plan}")
        for kind in ("into a branch", "into both, and out", "decides")
        for plan in PLANS
    ],
)
def test_another_batch_has_tensors_of_other_sizes(kind: str, plan: str, workers: LocalWorkers) -> None:
    ranks = 4 if plan == "data" else 3 if plan == "uneven" else 2
    alone = workers.run(trained, kind, {"mesh": "dp_shard=1"}, ranks=1)[0]
    for losses, parameters in workers.run(trained, kind, PLANS[plan], ranks=ranks):
        # Sums of rows: data ranks add up.
        assert losses == pytest.approx(alone[0], rel=1e-12)
        for name, p in parameters.items():
            if p is not None:
                torch.testing.assert_close(p, alone[1][name], rtol=1e-10, atol=1e-12)


def test_sizes_that_follow_from_the_model_do_not_cross() -> None:
    with pytest.raises(PlanError) as told:
        mw.make_recipe(lambda: Masked("of the model").double(), PLANS["two"], batch=batch(0))
    assert "a tensor whose size follows from values of the model" in str(told.value)
    assert "leave out on: for left" in str(told.value)
