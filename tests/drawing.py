"""Models that draw random numbers of their own beside modules that run in branches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from branching import DIM, MLP, rows

Draw = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Drawing(nn.Module):
    """Two blocks of one input, and a plain function that draws beside them or after them."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.block_a, self.block_b, self.drop = MLP(40), MLP(), nn.Dropout(0.5)
        self.path = nn.Sequential(self.block_a, nn.Dropout(0.25))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(F.dropout(self.head(self.draw(self, x, self.stem(x))), 0.2), y)}


def after(model: Any, x: Tensor, h: Tensor) -> Tensor:
    return F.dropout(model.block_a(h) + model.block_b(h), 0.5)


def of_one_branch(model: Any, x: Tensor, h: Tensor) -> Tensor:
    """As parallel attention and MLP drop what each gives; the same module drops both."""
    return x + model.drop(model.block_a(h)) + model.drop(model.block_b(h)).tanh()


def of_other_strides(model: Any, x: Tensor, h: Tensor) -> Tensor:
    a = F.dropout(model.block_a(h).t(), 0.5).t()
    return a + F.dropout(model.block_b(h).unflatten(-1, (2, -1)).transpose(0, 1), 0.5).transpose(0, 1).flatten(1)


def in_place(model: Any, x: Tensor, h: Tensor) -> Tensor:
    a = model.block_a(h).mul(2)
    a = F.dropout(a, 0.5, inplace=True) * model.block_b(h).tanh()
    return a + torch.zeros_like(a).uniform_() * torch.rand_like(a)


def in_a_path(model: Any, x: Tensor, h: Tensor) -> Tensor:
    """The dropout stands in a module, with a block that is placed; between modules of one branch."""
    return model.block_b(F.dropout(model.block_b(h), 0.5)) * model.path(h)


def by_values(model: Any, x: Tensor, h: Tensor) -> Tensor:
    """How many numbers are drawn follows from values."""
    return torch.poisson(model.block_a(h).detach().exp()) + model.block_b(h)


DRAWS = {f.__name__: f for f in (after, of_one_branch, of_other_strides, in_place, in_a_path, by_values)}


def beside_one_device(draw: Draw, plan: Any, count: int) -> dict[str, Any]:
    """Of three steps of a job, and of one device with the same random numbers: the losses, by how much gradients differ, and
    whether the generator ends where it does on one device."""
    batch = {name: t.double() for name, t in rows(count).items()}
    try:
        job = mw.parallelize(functools.partial(Drawing, draw), plan, batch=batch, dtype=torch.float64)
    except mw.PlanError as error:
        return {"error": str(error)}
    begun = torch.get_rng_state()
    losses = [job.step(batch).item() for _ in range(3)]
    ended = torch.get_rng_state()
    gradients = {line.name: g for line, g in job.full_gradients()}
    torch.manual_seed(0)
    one, expected = Drawing(draw).double(), []
    torch.set_rng_state(begun)
    for _ in range(3):
        loss = one(**batch)["loss"]
        loss.backward()
        expected.append(loss.item())
    off = 0.0
    for name, p in one.named_parameters():
        if job.rank == 0:
            g = gradients[name]
            off = max(off, float((g - p.grad).abs().max()) if g is not None and p.grad is not None else g is not p.grad)
    return {"losses": losses, "expected": expected, "off": off, "in step": torch.equal(torch.get_rng_state(), ended)}


def all_beside_one_device(plan: Any, count: int) -> dict[str, dict[str, Any]]:
    return {draw: beside_one_device(DRAWS[draw], plan, count) for draw in DRAWS}
