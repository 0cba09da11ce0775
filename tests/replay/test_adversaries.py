"""What people do to a model between steps, in every layout: the losses, gradients and parameters of one device, step by step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import meshwright as mw
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.workers.pool import LocalWorkers, WorkerError, local_workers

WIDTH, HEADS, STEPS, RATE = 16, 4, 7, 0.05
Rows = dict[str, Tensor]


class Adapter(nn.Module):
    """A low-rank addition to a linear, which may be off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.on = base, True
        self.a, self.b = (
            nn.Parameter(torch.randn(2, base.in_features) / 3),
            nn.Parameter(torch.randn(base.out_features, 2) / 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) if self.on else self.base(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.scale = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (h.view(rows, length, HEADS, -1).transpose(1, 2) for h in self.qkv(self.norm(x)).split(WIDTH, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        h = self.down(F.gelu(self.up(x))) * (self.scale if self.training else 0.5)
        return x + h * torch.sigmoid(h.detach())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = block(h)
        return F.mse_loss(self.head(h), y)


def adapted() -> Model:
    model = Model()
    for block in model.blocks:
        block.qkv, block.up = Adapter(block.qkv), Adapter(block.up)
    return model


def under(parametrization: Callable[[nn.Module], object]) -> Callable[[], Model]:
    def build() -> Model:
        model = Model()
        for block in model.blocks:
            for linear in (block.o, block.up, block.down):
                parametrization(linear)
        return model

    return build


def switch(model: Any, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Adapter):
            module.on = step % 4 < 2
    if step in (0, 3):  # first the adapters are trained, then all
        for name, p in model.named_parameters():
            p.requires_grad_(step == 3 or "base" not in name)


def anneal(model: Any, step: int) -> None:
    model.train(step % 3 != 2)
    for block in model.blocks:
        block.scale = 1 / (1 + step)


def rows_of(step: int, rows: int = 4, length: int = 6) -> Rows:
    g = torch.Generator().manual_seed(step)
    return {name: torch.randn(rows, length, n, dtype=torch.float64, generator=g) for name, n in (("x", 6), ("y", 3))}


def uneven(step: int) -> Rows:
    return rows_of(step, *{3: (3, 6), 4: (4, 5), 6: (2, 3)}.get(step, (4, 6)))


Case = tuple[Callable[[], nn.Module], Callable[[Any, int], None], Callable[[int], Rows]]
CASES: dict[str, Case] = {
    "adapters": (adapted, switch, rows_of),
    "a scale by step, and modes": (Model, anneal, rows_of),
    "other rows and lengths": (Model, lambda model, step: None, uneven),
    "spectral norm": (under(parametrizations.spectral_norm), lambda model, step: None, rows_of),
    "weight norm": (under(parametrizations.weight_norm), lambda model, step: None, rows_of),
    "orthogonal": (under(parametrizations.orthogonal), lambda model, step: None, rows_of),
}
PLANS: dict[str, dict[str, Any]] = {
    "tp=2": {"mesh": {"tp": 2}},
    "dp_shard=2": {"mesh": {"dp_shard": 2}},
    "pp=2": {"mesh": {"pp": 2}, "microbatches": 2},
    "dp_shard=2,tp=2": {"mesh": {"dp_shard": 2, "tp": 2}},
    "pp=2,tp=2": {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2},
}
Found = tuple[list[float], list[dict[str, Tensor | None]], dict[str, Tensor | None]]


@torch.no_grad()
def descend(parameters: Any) -> None:
    for p in parameters:
        if p.grad is not None:
            local_tensor(p).sub_(local_tensor(p.grad), alpha=RATE)
            p.grad = None


def one_device(case: str) -> Found:
    build, change, rows = CASES[case]
    torch.manual_seed(0)
    model, losses, gradients = build().double(), [], []
    for step in range(STEPS):
        change(model, step)
        loss = model(**rows(step))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        descend(model.parameters())
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}


def over_devices(case: str, plan: dict[str, Any]) -> Found:
    """Runs on every rank: what rank 0 finds."""
    build, change, rows = CASES[case]
    job = mw.parallelize(lambda: build().double(), plan, batch=rows(0), loss=lambda output: output)
    ranks, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
    losses, gradients = [], []
    for step in range(STEPS):
        change(job.module, step)
        losses.append(float(job.step({name: x.tensor_split(ranks)[index] for name, x in rows(step).items()})))
        gradients.append({line.name: None if g is None else g.clone() for line, g in job.full_gradients()})
        descend(job.parameters())
    return losses, gradients, {line.name: value for line, value in job.full_parameters()}


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], where: str) -> None:
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, f"{where}: {name}"
        else:
            torch.testing.assert_close(
                found[name], value, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{where}: {n}: {m}"
            )


@pytest.mark.proof
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_device(case: str, plan: str, workers: LocalWorkers) -> None:
    ((losses, gradients, parameters),) = workers.run(one_device, case, ranks=1)
    found, *_ = workers.run(over_devices, case, PLANS[plan], ranks=mw.Plan(PLANS[plan]["mesh"]).mesh.size)
    assert found[0] == pytest.approx(losses, rel=1e-9)
    for step, (here, there) in enumerate(zip(found[1], gradients, strict=True)):
        same(here, there, f"gradients of step {step}")
    same(found[2], parameters, "parameters")


def dies(compile: bool, told: Path) -> None:
    """Runs on every rank: rank 1 is killed within a step whose blocks are replayed; rank 0 writes down its error."""
    with mock.patch.object(torch, "compile", lambda f, **_: f):  # as the compiler is handed it
        rows, plan = rows_of(0), {"mesh": {"tp": 2}, "compile": compile}
        job = mw.parallelize(lambda: Model().double(), plan, batch=rows, loss=lambda output: output)
        for _ in range(4):
            job.step(rows)
        assert job.program("blocks.0").nodes and not any("not compiled" in note for note in job.notes)
        if job.rank == 1:
            job.module.head.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            job.step(rows)
        except RuntimeError as error:
            told.write_text(str(error))
            raise


@pytest.mark.proof
@pytest.mark.parametrize("compile", [False, True])
def test_a_rank_that_is_killed_within_a_replayed_step_ends_the_others(compile: bool, tmp_path: Path) -> None:
    with local_workers(2) as pool:
        with pytest.raises(WorkerError) as caught:
            pool.run(dies, compile, tmp_path / "told", timeout=300)
        assert caught.value.rank == 1 and "SIGKILL" in caught.value.reason
        assert "rank 1 ended without a word" in (tmp_path / "told").read_text()
