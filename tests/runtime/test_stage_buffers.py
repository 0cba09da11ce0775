"""What one stage or branch changes while training is what others read in an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.workers.pool import LocalWorkers

WIDTH = 6
BRANCHES = {"mesh": "tp=2", "modules": {"a": {"on": "tp[0]"}, "b": {"on": "tp[1]"}}}
STAGES = {"mesh": "pp=2", "microbatches": 2}


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{key: torch.randn(8, WIDTH, generator=draw, dtype=torch.float64) for key in ("x", "y")} for _ in range(4)]


class Counting(nn.Module):
    """Counts its forwards in training, and averages what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        if self.training:
            self.count += 1
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return h


class Warmed(nn.Module):
    """All stages read the count that the first one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Counting(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h) * (1 - 0.5 * torch.exp(-self.first.count))
        return {"loss": functional.mse_loss(h, y)}


class Calibrated(nn.Module):
    """Reads in an evaluation alone what its branches averaged in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Counting(), Counting(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.a(x) + self.b(x)
        if not self.training:
            h = h + self.a.mean * self.a.count - self.b.mean
        return {"loss": functional.mse_loss(self.head(h), y)}


class Attributes(nn.Module):
    """Keeps in an attribute a number, a tensor or a container, of the last rows, and uses it in an evaluation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kind, self.last, self.kept = kind, 1.0, [torch.ones((), dtype=torch.float64)]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        if self.training:
            size = h.detach().abs().mean()
            self.kept[0] = self.kept[0] * 0.5 + size
            self.last = float(size) if self.kind == "number" else size
        for block in self.blocks:
            h = h + block(h).tanh()
        if not self.training:
            h = h * (self.kept[0] if self.kind == "container" else self.last)
        return {"loss": functional.mse_loss(h, y)}


def losses_of(step: Callable[..., Tensor], evaluate: Callable[..., Tensor], module: nn.Module) -> list[float]:
    """Of steps and evaluations in turns; there is one after each step at first, then after some."""
    parameters = [p for p in module.parameters() if not p.is_meta]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for i, batch in enumerate([*batches(), *batches()]):
        losses.append(float(step(batch)))
        optimizer.step()
        optimizer.zero_grad()
        if i != 3:
            module.eval()
            losses.append(float(evaluate(batch)))
            module.train()
    return losses


def losses_over(build: Any, plan: Any) -> list[float]:
    job = mw.parallelize(build, plan, batch=batches()[0], dtype=torch.float64)

    def rows(batch: Any) -> Any:
        return rows_of_rank(batch, job.recipe, job.rank)

    return losses_of(lambda b: job.step(rows(b)), lambda b: job.evaluate(rows(b)), job.module)


def losses_of_one_device(build: Any) -> list[float]:
    torch.manual_seed(0)
    model = build().double()

    def step(batch: Any) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        loss.backward()
        return loss.detach()

    def evaluate(batch: Any) -> Tensor:
        with torch.no_grad():
            loss: Tensor = model(**batch)["loss"]
        return loss

    return losses_of(step, evaluate, model)


CASES = {
    "a count that all stages read": (Warmed, STAGES),
    "averages of branches": (Calibrated, BRANCHES),
    "averages of stages": (Calibrated, STAGES),
    "a number of the last rows, over data": (lambda: Attributes("number"), "dp_shard=2"),
    "a number of the last rows, over stages": (lambda: Attributes("number"), STAGES),
    "a container of tensors, over stages": (lambda: Attributes("container"), STAGES),
    "a tensor of the last rows, over data": (
        lambda: Attributes("tensor"),
        {"mesh": "dp_shard=2", "microbatches": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_reads_what_training_left(name: str, workers: LocalWorkers) -> None:
    build, plan = CASES[name]
    wanted = losses_of_one_device(build)
    for found in workers.run(losses_over, build, plan, ranks=2):
        assert found == pytest.approx(wanted, rel=1e-9)


class Cached(nn.Module):
    """Makes a mask in its first forward, and keeps it as a buffer: ``how`` says whether the name was there before."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("before", torch.ones(WIDTH))
        if how == "None before":
            self.register_buffer("mask", None, persistent=False)
        self.register_buffer("after", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = getattr(self, "mask", None)
        if mask is None:
            mask = torch.ones(WIDTH, WIDTH, device=x.device, dtype=torch.bool).triu(1)
            self.register_buffer("mask", mask, persistent=False)
        return x + (self.linear(x) @ mask.to(x.dtype)) * self.before * self.after


@pytest.mark.parametrize("mesh", ["pp=2", "pp=3", "tp=2", "dp_shard=2", "pp=2,tp=2"])
@pytest.mark.parametrize("how", ["None before", "new"])
def test_buffers_that_forwards_make(how: str, mesh: str, workers: LocalWorkers) -> None:
    report = mw.check(partial(CachedBlocks, how), batches()[0], mesh, workers=workers, dtype=torch.float64)
    assert report, report


class CachedBlocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached(how) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": functional.mse_loss(x, y)}
