"""Recordings around a job of ours: uneven shares, fused blocks, stages, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


class Fused(nn.Module):
    """A fused projection of 6 heads, which does not divide by 4, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, 12), nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).chunk(3, -1)
            x = x + out(
                nn.functional.scaled_dot_product_attention(*(_heads(t) for t in (q, k, v))).transpose(1, 2).flatten(2)
            )
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (6, 2)).transpose(1, 2)


IDS = torch.arange(40).view(8, 5) % 11


def alone(path: Path) -> None:
    torch.manual_seed(0)
    model = Fused().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with mw.record(model, path, optimizer=optimizer, steps=2) as rec:
        for _ in range(2):
            loss = model(IDS)
            loss.backward()
            rec.loss(loss)
            optimizer.step()
            optimizer.zero_grad()


def as_job(path: Path, plan: dict[str, Any]) -> None:
    job = mw.parallelize(Fused, plan | {"precision": "float64"}, batch={"ids": IDS}, loss=lambda output: output)
    rows = IDS.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2, foreach=False)
    with mw.record(job, path, optimizer=optimizer, steps=2) as rec:
        for _ in range(2):
            rec.loss(job.step({"ids": rows}))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 2, "tp": 2}},
        pytest.param({"mesh": {"pp": 2, "dp_shard": 2}, "microbatches": 2}, marks=pytest.mark.proof),
    ],
)
def test_a_job_is_recorded_as_it_is(plan: dict[str, Any], tmp_path: Path, workers: LocalWorkers) -> None:
    alone(tmp_path / "one")
    workers.run(as_job, tmp_path / "four", plan, ranks=4)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "four")
    assert found.passed, str(found)
    assert found.judged["gradients"] == found.judged["updates"] == (18, 18) and found.steps == 2
