"""Units of FSDP2: forwards and parameters that FSDP2 by itself does not take."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.workers.pool import LocalWorkers

PLANS = [{"mesh": {"dp_shard": 2}}, {"mesh": {"dp_shard": 2}, "recompute": "blocks", "microbatches": 2}]


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Teacher(nn.Module):
    """Its teacher follows the student by the states of both, within the forward."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self.loads = loads
        self.student = nn.Sequential(Block(), Block())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            old, new = self.teacher.state_dict(), self.student.state_dict()
            if self.loads:
                self.teacher.load_state_dict({name: 0.9 * old[name] + 0.1 * new[name] for name in old})
            else:
                for name, value in old.items():
                    value.lerp_(new[name], 0.1)
            target = self.teacher(x)
        return functional.mse_loss(self.student(x + 0.1), target)


class OwnState(Block):
    """A unit that reads its own state."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-2 * sum(value.square().sum() for value in self.state_dict().values()))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnState() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Transposed(nn.Module):
    """Its parameter does not lie in memory row by row, as what ``torch.linalg.qr`` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.block = nn.Parameter(torch.randn(6, 6).T), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x @ self.weight).square().mean()


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.contiguous(memory_format=torch.channels_last)).square().mean()


def passes(build: Any, x: Tensor, plan: Any, workers: LocalWorkers) -> None:
    report = mw.check(build, (x,), plan, loss=lambda loss: loss, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "plan", [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.proof)], ids=["shards", "recompute"]
)
@pytest.mark.parametrize(
    "build", [lambda: Teacher(False), lambda: Teacher(True), Blocks], ids=["reads", "loads", "own"]
)
def test_a_forward_may_ask_for_the_state_of_its_modules(build: Any, plan: Any, workers: LocalWorkers) -> None:
    passes(build, rows(4, 6), plan, workers)


def test_the_state_between_steps_is_sharded() -> None:
    job = mw.parallelize(Blocks, {"mesh": "dp_shard=1", "precision": "bfloat16"}, batch=(rows(4, 6).float(),))
    job.step((rows(4, 6).float(),))
    assert {type(value).__name__ for value in job.module.state_dict().values()} == {"DTensor"}


@pytest.mark.parametrize(
    ("build", "shape"), [(Transposed, (4, 6)), pytest.param(ChannelsLast, (4, 2, 5, 5), marks=pytest.mark.proof)]
)
def test_parameters_may_lie_in_memory_as_they_like(build: Any, shape: Any, workers: LocalWorkers) -> None:
    passes(build, rows(*shape), PLANS[0], workers)


class Viewed(nn.Module):
    """A unit that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).view(-1, 2, 6)[:, 0]


class WrittenViews(nn.Module):
    """Writes to views that its units return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(x)
            h += x
            x = h.mul_(0.9)
        return x.square().mean()


def warnings_of(x: Tensor, plan: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = mw.parallelize(WrittenViews, plan, batch=x, dtype=torch.float64)
        for _ in range(3):
            job.step(rows_of_rank(x, job.recipe, job.rank))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("plan", PLANS, ids=["sharded", "recomputed"])
def test_a_unit_may_return_a_view_that_the_model_writes_to(plan: Any, workers: LocalWorkers) -> None:
    x = rows(8, 6)
    passes(WrittenViews, x, plan, workers)
    assert workers.run(warnings_of, x, plan, ranks=2) == [[], []]  # torch's own, of views, does not hold here
