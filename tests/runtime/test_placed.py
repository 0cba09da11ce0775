"""Parameters that a person puts others in the place of, between steps: as on one device, or one error that says which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(6, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down(x)


def assign(module: nn.Module, p: nn.Parameter) -> None:
    module.weight = p  # type: ignore[assignment]


def assign_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def exchange(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


@torch.no_grad()
def write(model: Any) -> None:
    model.blocks[0].up.weight.mul_(0.5)
    model.blocks[1].norm.weight.data.mul_(1.5)
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def put_on(module: nn.Module) -> None:
    module.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))


def another_class(model: Any) -> None:
    model.blocks[0].up.__class__ = Doubled


def another_forward(model: Any) -> None:
    up = model.blocks[0].up
    up.forward = lambda x: 2 * nn.functional.linear(x, up.weight, up.bias)


def adapt(model: Any) -> None:
    model.blocks[1].up = Adapted(model.blocks[1].up)


CHANGES: dict[str, Callable[[Any], object]] = {
    "written": write,
    "modules change places": exchange,
    "a copy of it": lambda model: assign(model.blocks[0].up, nn.Parameter(model.blocks[0].up.weight.detach() * 0.5)),
    "a plain one": lambda model: assign(model.blocks[0].up, nn.Parameter(torch.ones(8, 6, dtype=torch.float64))),
    "data": lambda model: assign_data(model.blocks[0].up.weight),
    "an adapter": adapt,
    "another class": another_class,
    "another forward": another_forward,
    "a parameter of a module that had none": lambda model: put_on(model.blocks[1]),
    "removed": lambda model: setattr(model.blocks[0], "up", nn.Identity()),
    "parametrized": lambda model: parametrize.register_parametrization(model.blocks[0].up, "weight", Halved()),
}


def rows(step: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: Any, step: Callable[[Tensor], Tensor], change: Callable[[Any], object], steps: int = 6) -> list[float]:
    losses = []
    for i in range(steps):
        if i == 3:
            change(model)
        losses.append(float(step(rows(i))))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:  # another stage's has none here
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None
    return losses


def one_device(change: str) -> list[float]:
    torch.manual_seed(0)
    model = Model().double()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        return loss.detach()

    return train(model, step, CHANGES[change])


def over_devices(change: str, mesh: str) -> tuple[list[float], str]:
    """Runs on every rank: losses, or the error."""
    job = mw.parallelize(lambda: Model().double(), mesh, batch=rows(0))
    ranks, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
    try:
        return train(job.module, lambda x: job.step(x.chunk(ranks)[index]), CHANGES[change]), ""
    except mw.PlanError as error:
        return [], str(error)


RIGHT = [
    ("written", "tp=2"),
    ("written", "dp_shard=2"),
    ("data", "tp=2"),
    ("data", "dp_shard=2"),
    ("modules change places", "dp_shard=2"),
    ("a copy of it", "tp=2"),
    ("another forward", "tp=2"),
    ("another forward", "dp_shard=2"),
]


@pytest.mark.parametrize(("change", "mesh"), RIGHT)
def test_what_is_changed_as_on_one_device_trains_so(change: str, mesh: str, workers: LocalWorkers) -> None:
    (expected,) = workers.run(one_device, change, ranks=1)
    for losses, error in workers.run(over_devices, change, mesh, ranks=2):
        assert not error
        assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("change", "mesh", "name", "said"),
    [
        ("a copy of it", "dp_shard=2", "blocks.0.up.weight", "another parameter since the job was made"),
        ("a plain one", "dp_shard=2", "blocks.0.up.weight", "another parameter since the job was made"),
        ("a plain one", "tp=2", "blocks.0.up.weight", "another parameter since the job was made"),
        ("an adapter", "dp_shard=2", "blocks.1.up.down.weight", "was not there when the job was made"),
        ("another class", "tp=2", "blocks.0.up", "of another class since the job was made: Linear, now Doubled"),
        ("another forward", "pp=2", "blocks.0.up.forward", "another function since the job was made"),
        (
            "a parameter of a module that had none",
            "dp_shard=2",
            "blocks.1.scale",
            "was not there when the job was made",
        ),
        ("parametrized", "tp=2", "blocks.0.up.parametrizations.weight.original", "was not there when the job was made"),
        ("removed", "dp_shard=2", "blocks.0.up.weight", "was removed or replaced since the job was made"),
        ("removed", "pp=2", "blocks.0.up.weight", "was removed or replaced since the job was made"),
    ],
)
def test_what_would_be_lost_is_an_error_on_every_rank(
    change: str, mesh: str, name: str, said: str, workers: LocalWorkers
) -> None:
    for _, error in workers.run(over_devices, change, mesh, ranks=2):
        assert name in error and said in error


def saved_without(mesh: str, folder: str) -> list[str]:
    """The errors of a job from which a parameter was removed after its last step."""
    job = mw.parallelize(lambda: Model().double(), mesh, batch=rows(0))
    job.step(rows(0))
    CHANGES["removed"](job.module)
    told = []
    for collect in (job.full_state_dict, lambda: list(job.full_gradients()), lambda: job.save(folder, step=1)):
        try:
            collect()
        except (mw.PlanError, mw.CheckpointError) as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_what_is_removed_is_not_waited_for(mesh: str, workers: LocalWorkers, tmp_path: Path) -> None:
    """One rank has it, another waits for it: a hang, if only the one noticed."""
    for told in workers.run(saved_without, mesh, str(tmp_path), ranks=2):
        assert len(told) == 3 and all("blocks.0.up.weight" in error for error in told), told
