"""Ranks of tp and pp run one forward together: what they run must be the same, and on the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return (x - y).square().mean()


def rows(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 8, generator=generator) for name in "xy"}


OTHER: dict[str, Any] = {
    "fewer rows": lambda job: job.step({name: t[:1] for name, t in rows().items()}),
    "no rows": lambda job: job.step({name: t[:0] for name, t in rows().items()}),
    "another type": lambda job: job.step({name: t.double() for name, t in rows().items()}),
    "an evaluation": lambda job: job.evaluate(rows()),
    "other labels": lambda job: job.step({"x": rows()["x"], "y": rows(1)["y"]}),
}


def told(mesh: str) -> dict[str, str]:
    """Rank 1 runs something else than rank 0; each time all are told, and may go on."""
    job = mw.parallelize(Tower, {"mesh": mesh, "verify": 1}, batch=rows(), loss=lambda y: y)
    errors = {}
    for what, other in OTHER.items():
        job.step(rows())
        try:
            errors[what] = str(float((lambda job: job.step(rows()), other)[job.rank](job)))
        except mw.PlanError as error:
            errors[what] = str(error)
    job.step(rows())
    return errors


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_what_is_not_the_same_is_one_error_on_all_ranks(mesh: str, workers: LocalWorkers) -> None:
    first, second = workers.run(told, mesh, ranks=2, timeout=60)
    assert first == second
    for what, error in first.items():
        assert "the same on all ranks of tp and pp" in error, (what, error)
        assert "rank 0: job.step(x: float32 (4, 8), y: float32 (4, 8))" in error, (what, error)
