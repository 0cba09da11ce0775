"""Gradients of tensors of the batch: adversarial examples, a prompt that is learned outside of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from test_batch_containers import PLANS, WIDTH
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.workers.pool import LocalWorkers


class SkipsStages(nn.Module):
    """Uses its input in the first stage and in the last, and writes to another tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, seen: Tensor) -> dict[str, Tensor]:
        h = x
        for block in self.blocks:
            h = block(h).tanh()
        seen.add_(h.detach())
        return {"loss": functional.mse_loss(h * x, y)}


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {key: torch.randn(8, WIDTH, generator=draw, dtype=torch.float64) for key in ("x", "y", "seen")}


def gradients(step: Any, share: dict[str, Tensor]) -> list[Tensor]:
    """Of two steps, which add up; and of a shift that is added to the input."""
    x, shift = share["x"].clone().requires_grad_(), torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    step({**share, "x": x})
    step({**share, "x": x})
    step({**share, "x": share["x"] + shift})
    assert x.grad is not None and shift.grad is not None
    return [x.grad, shift.grad]


def on_a_mesh(plan: dict[str, Any]) -> Any:
    job = mw.parallelize(SkipsStages, plan, batch=batch(), dtype=torch.float64)
    rows = len(rows_of_rank(batch(), job.recipe, job.rank)["x"])
    first = job.recipe.mesh.data_index(job.rank) * rows
    share = {key: t[first : first + rows] for key, t in batch().items()}
    return gradients(job.step, share), slice(first, first + rows)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[] if plan in ("pp=2", "whole") else [pytest.mark.proof]) for plan in PLANS]
)
def test_gradients_of_the_batch_are_those_of_one_device(plan: str, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    model = SkipsStages().double()
    wanted, wanted_shift = gradients(lambda batch: model(**batch)["loss"].backward(), batch())
    shifts = []
    for (gradient, shift), rows in workers.run(on_a_mesh, PLANS[plan], ranks=2, timeout=120):
        torch.testing.assert_close(gradient, wanted[rows])
        shifts.append(shift)
    if PLANS[plan]["mesh"].startswith("dp_"):  # each rank has what its rows add
        shifts = [sum(shifts[1:], shifts[0])]
    for shift in shifts:
        torch.testing.assert_close(shift, wanted_shift)


class Encoded(Mapping[str, Tensor]):
    """A mapping that keeps its tensors in two places."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.cache = tensors, list(tensors.values())

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_a_batch_without_gradients_may_be_any_mapping() -> None:
    x = torch.randn(4, 3)
    job = mw.parallelize(Line, {"mesh": "dp_shard=1"}, batch={"x": x})
    assert torch.isfinite(job.step(Encoded({"x": x})))
