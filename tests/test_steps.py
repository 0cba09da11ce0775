"""Several steps are those of one device: gradients add up over calls of ``step`` until they are set to zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import branching as models
import meshwright as mw
from meshwright.place import bounds
from meshwright.run.step import take_rows
from meshwright.run.workers import LocalWorkers

Batches = list[dict[str, Tensor]]
DIM = 8


def rows(count: int = 8, classes: int = 5) -> Batches:
    """Three batches that differ."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(count, DIM, generator=draw, dtype=torch.float64),
            "y": torch.randn(count, classes, generator=draw, dtype=torch.float64),
        }
        for _ in range(3)
    ]


class Scaled(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.head(x * self.scale), y)}


class Tied(nn.Module):
    """One table at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"loss": F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


def tokens() -> Batches:
    draw = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(0, 11, (8, 6), generator=draw)} for _ in range(3)]


class Experts(nn.Module):
    """Each row goes to one of four experts, by what it says itself."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return {"loss": F.mse_loss(self.head(out), y)}


def chosen() -> Batches:
    """The first batch takes experts 0 and 1, each on one data rank only; the second takes expert 1; the third, 2."""
    ways = [[0, 0, 0, 0, 1, 1, 1, 1], [1] * 8, [1, 2] * 4]
    return [{**batch, "chosen": torch.tensor(way)} for batch, way in zip(rows(), ways, strict=True)]


class Shared(nn.Module):
    """Two branches whose blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.block_a, self.block_b = models.MLP(16, DIM), models.MLP(16, DIM)
        self.block_b.up.weight = self.block_a.up.weight

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a = self.block_a(x)
        b = self.block_b(x)
        return {"loss": F.mse_loss(self.head(a + b), y)}


# --- gradients add up -------------------------------------------------------------------------------------------------

Case = tuple[Callable[[], nn.Module], Batches, Any, bool]
ACCUMULATED: dict[str, Case] = {
    "a parameter without dims": (Scaled, rows(), "dp_shard=2", False),
    "a table of two stages": (Tied, tokens(), {"mesh": {"pp": 2}, "microbatches": 2}, True),
    "a table of two stages, over data": (Tied, tokens(), "pp=2,dp_shard=2", True),
    "a weight of two branches": (Shared, rows(), models.beside(1, 1), True),
    "experts that a step leaves out": (Experts, chosen(), "dp_shard=2", True),
    "experts that a step leaves out, zeros kept": (Experts, chosen(), "dp_shard=2", False),
}


def one_device(build: Callable[[], nn.Module], batches: Batches, to_none: bool) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(2):
        for batch in batches:
            model(**batch)["loss"].backward()
            found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return found


def accumulated(cases: list[Case]) -> list[list[dict[str, Tensor | None]]]:
    found = []
    for build, batches, plan, to_none in cases:
        job = mw.parallelize(build, plan, batch=batches[0], dtype=torch.float64)
        mesh = job.recipe.mesh
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1, momentum=0.9)
        gradients: list[dict[str, Tensor | None]] = []
        for _ in range(2):
            for batch in batches:
                start, stop = bounds(8, mesh.data_size)[mesh.data_index(job.rank)]
                kept = [p.grad for p in job.parameters()]
                job.step(take_rows(batch, start, stop))
                assert all(b is None or a is b for a, b in zip((p.grad for p in job.parameters()), kept, strict=True))
                gradients.append({line.name: None if g is None else g.clone() for line, g in job.whole_gradients()})
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        found.append(gradients)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_steps_add_up_until_they_are_set_to_zero(ranks: int, workers: LocalWorkers) -> None:
    cases = {name: c for name, c in ACCUMULATED.items() if mw.Plan.parse(c[2]).mesh.size == ranks}
    wrong = []
    for (name, (build, batches, _, to_none)), job in zip(
        cases.items(), workers.run(accumulated, list(cases.values()), ranks=ranks)[0], strict=True
    ):
        for step, (found, wanted) in enumerate(zip(job, one_device(build, batches, to_none), strict=True)):
            for parameter, g in wanted.items():
                here = found[parameter]
                same = here is g if here is None or g is None else torch.allclose(here, g, rtol=1e-9, atol=1e-12)
                if not same:
                    wrong.append(f"{name}: {parameter} after backward {step + 1}")
    assert not wrong, "\n".join(wrong)
