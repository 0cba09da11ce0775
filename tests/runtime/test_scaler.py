"""A ``GradScaler`` leaves out a step on all ranks alike, as on one device, whichever rank holds the gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
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

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def rows() -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(
    parameters: Any, named: Any, scaler: Any, step: Callable[[Tensor], Tensor], holds: bool
) -> list[tuple[float, float]]:
    """Four steps; in the second, a gradient of the first block is infinite, where it is held. The losses and scales."""
    optimizer, told = torch.optim.SGD(parameters, lr=0.1), []
    for i in range(4):
        loss = float(step(rows()))
        if i == 1 and holds:
            grad = dict(named)["blocks.0.weight"].grad
            (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append((loss, scaler.get_scale()))
    return told


def new_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)


def on_one_device() -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model, scaler = Tower().double(), new_scaler()

    def step(x: Tensor) -> Tensor:
        loss = scaler.scale(model(x))
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    return train(model.parameters(), model.named_parameters(), scaler, step, holds=True)


def over(mesh: str) -> list[tuple[float, float]]:
    scaler = new_scaler()
    job = mw.parallelize(Tower, mesh, batch={"x": rows()}, loss=lambda y: scaler.scale(y), dtype=torch.float64)
    at, ranks = job.recipe.mesh.data_index(job.rank), job.recipe.mesh.data_size
    holds = "blocks.0.weight" in dict(job.named_parameters()) and job.rank == 0
    return train(job.parameters(), job.named_parameters(), scaler, lambda x: job.step({"x": x.chunk(ranks)[at]}), holds)


@pytest.mark.parametrize("mesh", ["pp=2", "dp_shard=2", "tp=2"])
def test_all_ranks_leave_out_the_step_that_one_device_does(mesh: str, workers: LocalWorkers) -> None:
    (expected,) = workers.run(on_one_device, ranks=1)
    for told in workers.run(over, mesh, ranks=2):
        assert [scale for _, scale in told] == [scale for _, scale in expected]
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
