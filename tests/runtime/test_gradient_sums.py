"""Gradients that the job sums itself: as few collectives as there are groups, and the sums of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.private import TorchDispatchMode
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.runtime.weights.gradient_sums import GradientSums
from meshwright.workers.pool import LocalWorkers

X = torch.arange(24.0).view(8, 3) / 24 - 0.4
SCALES = 6


class Scaled(nn.Module):
    """Linears with scales without dims, of which the last is not used, and the first is used with each linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i / 8)) for i in range(SCALES))

    def forward(self, x: Tensor) -> Tensor:
        for linear, scale in zip(self.linears, self.scales[1:5], strict=True):
            x = linear(x * scale).tanh() * self.scales[0]
        return x.square().mean()


def itself(out: Tensor) -> Tensor:
    """The loss of a model that returns it."""
    return out


class _Counted(TorchDispatchMode):
    """How many numbers each all-reduce takes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            self.sizes.append(sum(t.numel() for t in args[0]))
        return func(*args, **kwargs or {})


def _step(plan: Any) -> tuple[dict[str, Tensor], list[int], set[str]]:
    """Gradients on rank 0; how many numbers each all-reduce of the job's own sums took; parameters without a gradient."""
    job = mw.parallelize(Scaled, plan, batch=(X,), loss=itself, device="cpu", dtype=torch.float64)
    rows, counted = rows_of_rank((X.double(),), job.recipe, job.rank), _Counted()
    job.step(rows)
    job.module.zero_grad()
    summed = GradientSums.sum

    def counting(sums: GradientSums) -> None:
        with counted:
            summed(sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSums, "sum", counting)
        job.step(rows)
    found = {line.name: value for line, value in job.full_gradients() if value is not None}
    return found, counted.sizes, {name for name, p in job.named_parameters() if p.grad is None}


@pytest.mark.parametrize(
    ("plan", "calls"),
    [
        ("dp_shard=2", [5]),  # all of them at once
        ("dp_replicate=2,dp_shard=2", [5, 5]),  # over each axis
        ({"mesh": "pp=2", "microbatches": 2}, [1]),  # the one that both stages use
        ({"mesh": "pp=2,dp_shard=2", "microbatches": 2}, [1, 1, 3]),  # that one over data and stages, three over data
    ],
    ids=str,
)
def test_gradients_of_one_kind_are_summed_at_once(plan: Any, calls: list[int], workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    model(X.double()).backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    results = workers.run(_step, plan, ranks=mw.Plan.parse(plan).mesh.size)
    found, sizes, without = results[0]
    assert found.keys() == plain.keys() and "scales.5" not in found
    assert all(torch.allclose(found[name], plain[name], rtol=1e-12, atol=1e-14) for name in plain)
    assert sizes == calls
    assert without <= {"scales.5"}
