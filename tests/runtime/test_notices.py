"""What one rank alone finds wrong before a step is told to all ranks: nobody waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

TIMEOUT = 30.0  # of collectives: what is told comes sooner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x).square().mean()


class Coupled(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def rows(step: int) -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def replace(job: Any, batch: Any) -> Any:
    up = job.module.blocks[1]
    up.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    return batch


WRONG = {
    "a parameter was replaced": replace,
    "no rows": lambda job, batch: torch.tensor(1.0),
    "no batch": lambda job, batch: None,
    "on another device": lambda job, batch: batch.to("meta"),
    "a hook that waits": lambda job, batch: (
        job.module.blocks[0].bias.register_post_accumulate_grad_hook(print) and batch
    ),
}


def one_rank_errs(
    plan: dict[str, Any], models: list[type[Model]], bad: int, before: int
) -> list[tuple[str, str, float]]:
    """Runs on every rank: what is wrong there, the error, and how long it took to come."""
    found = []
    for build in models:
        for name, change in WRONG.items():
            job = mw.parallelize(lambda build=build: build().double(), plan, batch=rows(0), timeout=TIMEOUT)
            ranks, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
            for step in range(before):
                job.step(rows(step).chunk(ranks)[index])
            batch: Any = rows(before).chunk(ranks)[index]
            if job.rank == bad:
                batch = change(job, batch)  # type: ignore[no-untyped-call, operator]
            start = time.monotonic()
            try:
                job.step(batch)
                error = "none"
            except (mw.PlanError, ValueError) as raised:
                error = f"{type(raised).__name__}: {raised}"
            found.append((f"{build.__name__}: {name}", error, time.monotonic() - start))
    return found


CASES = [
    ({"mesh": "dp_shard=2"}, [Model, Coupled], 1, 1),
    ({"mesh": "tp=2"}, [Model], 0, 1),
    ({"mesh": "pp=2", "microbatches": 2}, [Model], 0, 1),
]
MORE = [
    ({"mesh": "dp_shard=2"}, [Model, Coupled], 0, 0),
    ({"mesh": "dp_replicate=2,tp=2"}, [Model, Coupled], 3, 2),
    ({"mesh": "pp=2,dp_shard=2", "microbatches": 2}, [Model, Coupled], 1, 1),
    ({"mesh": "dp_replicate=2,dp_shard=2"}, [Model, Coupled], 2, 3),
]


@pytest.mark.parametrize(
    ("plan", "models", "bad", "before"), [*CASES, *(pytest.param(*c, marks=pytest.mark.proof) for c in MORE)]
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    plan: dict[str, Any], models: list[type[Model]], bad: int, before: int, workers: LocalWorkers
) -> None:
    ranks = mw.Plan.parse(plan).mesh.size
    for rank, found in enumerate(workers.run(one_rank_errs, plan, models, bad, before, ranks=ranks)):
        for name, error, seconds in found:
            assert error != "none" and (rank == bad or f"rank {bad}" in error), (rank, name, error)
            assert seconds < TIMEOUT / 2, (rank, name)
