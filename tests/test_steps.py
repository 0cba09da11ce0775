"""Several steps are those of one device: gradients that add up, and batches that a model writes to."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchFeature

import branching as models
import meshwright as mw
from meshwright.runtime.rows.microbatches import take_rows
from meshwright.submesh import bounds
from meshwright.workers.pool import LocalWorkers

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
                gradients.append({line.name: None if g is None else g.clone() for line, g in job.full_gradients()})
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        found.append(gradients)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
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


# --- models that write to what they are given -------------------------------------------------------------------------


class Writes(nn.Module):
    """Normalises its input in place, counts up a tensor without rows, and shifts its labels in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Embedding(), nn.LayerNorm(DIM), nn.Linear(DIM, 11)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor, labels: Tensor, age: Tensor) -> dict[str, Tensor]:
        x.sub_(0.5).mul_(0.9)
        age += 1
        out = self.first(ids) + x[:, None] / age.sum()
        for block in self.blocks:
            out = out + block(out).tanh()
        labels[:, :-1] = labels[:, 1:].clone()
        labels[:, -1] = -100
        return {"loss": F.cross_entropy(self.last(self.norm(out)).flatten(0, 1), labels.flatten())}


class Embedding(nn.Module):
    """Writes to its indices in a call that other stages do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        ids.add_(1).remainder_(11)
        return self.table(ids.clone())


class WritesAndCouples(Writes):
    """The same, and rows are compared with each other."""

    def forward(self, x: Tensor, ids: Tensor, labels: Tensor, age: Tensor) -> dict[str, Tensor]:
        x.sub_(x.mean(0))
        return super().forward(x, ids, labels, age)


def written(count: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 11, (count, 6), generator=draw)
    labels[0, :4] = -100  # rows have different numbers of labels
    return {
        "x": torch.randn(count, DIM, generator=draw, dtype=torch.float64),
        "ids": torch.randint(0, 11, (count, 6), generator=draw),
        "labels": labels,
        "age": torch.ones(3, dtype=torch.float64),
    }


WRITING = {
    "one rank": (Writes, "tp=1", 1),
    "microbatches": (Writes, {"mesh": {"dp_shard": 1}, "microbatches": 2}, 1),
    "tp": (Writes, "tp=2", 2),
    "data": (Writes, "dp_shard=2", 2),
    "data, coupled": (WritesAndCouples, "dp_shard=2", 2),
    "stages": (Writes, {"mesh": {"pp": 2}, "microbatches": 2}, 2),
    "stages, two a rank": (Writes, {"mesh": {"pp": 2}, "microbatches": 2, "schedule": "interleaved"}, 2),
    "stages, coupled": (WritesAndCouples, {"mesh": {"pp": 2}, "microbatches": 2}, 2),
}

Steps = tuple[list[float], dict[str, Tensor], list[dict[str, Tensor]]]


def stepped(model: Any, batch: dict[str, Tensor], step: Callable[[dict[str, Tensor]], Tensor]) -> tuple[Any, Any]:
    """The losses of three steps on one batch, and that batch after each."""
    optimizer, losses, batches = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for _ in range(3):
        losses.append(float(step(batch)))
        optimizer.step()
        optimizer.zero_grad()
        batches.append({k: v.clone() for k, v in batch.items()})
    return losses, batches


def writing_alone(build: Callable[[], nn.Module]) -> Steps:
    torch.manual_seed(0)
    model = build().double()

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        loss.backward()
        return loss.detach()

    losses, batches = stepped(model, written(), step)
    return losses, dict(model.named_parameters()), batches


def writing(cases: list[tuple[Callable[[], nn.Module], Any]]) -> list[Any]:
    found = []
    for build, plan in cases:
        sample = written()
        job = mw.parallelize(build, plan, batch=sample, dtype=torch.float64)
        untouched = all(torch.equal(a, b) for a, b in zip(sample.values(), written().values(), strict=True))
        mesh = job.recipe.mesh
        start, stop = bounds(8, mesh.data_size)[mesh.data_index(job.rank)]
        losses, batches = stepped(job, take_rows(written(), start, stop), job.step)
        whole = {line.name: p for line, p in job.full_parameters() if p is not None}
        found.append((untouched, losses, whole, batches, (start, stop), job.rows))
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["one rank", "microbatches"],
        ["tp", "data", "stages, coupled"],
        pytest.param(["data, coupled", "stages", "stages, two a rank"], marks=pytest.mark.proof),
    ],
    ids="; ".join,
)
def test_what_a_model_writes_to_its_batch_is_written_once_a_step(names: list[str], workers: LocalWorkers) -> None:
    cases = {name: WRITING[name][:2] for name in names}
    (ranks,) = {WRITING[name][2] for name in names}
    results = workers.run(writing, list(cases.values()), ranks=ranks)
    alone = {build: writing_alone(build) for build, _ in cases.values()}
    wrong = []
    for i, (name, (build, _)) in enumerate(cases.items()):
        wanted, parameters, batches = alone[build]
        for rank, found in enumerate(results):
            untouched, losses, whole, here, (start, stop), combined = found[i]
            said = f"{name}, rank {rank}"
            if not untouched:
                wrong.append(f"{said}: the sample was written to")
            if build is Writes and combined == "coupled":
                wrong.append(f"{said}: its rows are said to be coupled")
            if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-9):
                wrong.append(f"{said}: losses {losses}, on one device {wanted}")
            wrong += [f"{said}: {n}" for n, p in whole.items() if not torch.allclose(p, parameters[n], rtol=1e-9)]
            for step, (a, b) in enumerate(zip(here, batches, strict=True)):
                rows = take_rows(b, start, stop)
                wrong += [f"{said}: {k} after step {step + 1}" for k in a if not torch.allclose(a[k], rows[k])]
    assert not wrong, "\n".join(wrong)


# --- batches that are no dict -----------------------------------------------------------------------------------------


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class OfPairs(Scaled):
    """A model of one argument, an object."""

    def forward(self, pair: Pair) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(pair.x, pair.y)


def feature(**batch: Tensor) -> BatchFeature:
    """What transformers' processors and collators return."""
    return BatchFeature(batch)


class Weighed(nn.Module):
    """Weights of classes, of which there are as many as rows; and positions, as many as rows too."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.places = nn.Linear(DIM, 4), nn.Linear(1, DIM)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor, places: Tensor) -> dict[str, Tensor]:
        out = self.head(x + self.places(places[:, None]))
        return {"loss": F.cross_entropy(out.flatten(0, 1), y.flatten(), weights)}


def weighed(count: int, classes: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(count, classes, DIM, generator=draw, dtype=torch.float64),
        "y": torch.randint(0, classes, (count, classes), generator=draw),
        "weights": torch.rand(classes, generator=draw, dtype=torch.float64),
        "places": torch.arange(classes, dtype=torch.float64),
    }


def weighed_losses(samples: list[int]) -> list[float]:
    """Of batches of 8 rows: 4 on each data rank, as many as there are classes."""
    found = []
    for rows in samples:
        job = mw.parallelize(
            Weighed, {"mesh": {"dp_shard": 2}, "microbatches": 2}, batch=weighed(rows), dtype=torch.float64
        )
        batch = weighed(8)
        start = 4 * job.rank
        mine = {k: v[start : start + 4] if k in "xy" else v for k, v in batch.items()}
        found.append(float(job.step(mine)))
    return found


def test_a_tensor_that_all_rows_share_is_not_cut_where_it_has_as_many_entries_as_rows(workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    loss = float(Weighed().double()(**weighed(8))["loss"])
    assert workers.run(weighed_losses, [8, 4], ranks=2)[0] == pytest.approx([loss] * 2, rel=1e-9)


def losses_of(cases: list[tuple[Any, Any, Any]]) -> list[float]:
    found = []
    for build, kind, batch in cases:
        job = mw.parallelize(
            build, {"mesh": {"dp_shard": 2}, "microbatches": 2}, batch=kind(**batch), dtype=torch.float64
        )
        start = 4 * job.rank
        found.append(float(job.step(kind(**take_rows(batch, start, start + 4)))))
    return found


def test_a_batch_is_any_mapping_or_an_object_with_tensors(workers: LocalWorkers) -> None:
    batch = rows()[0]
    loss = one_loss(batch)
    cases: list[Any] = [
        (Scaled, dict, batch),
        (Scaled, UserDict, batch),
        (Scaled, feature, batch),
        (OfPairs, Pair, batch),
    ]
    assert workers.run(losses_of, cases, ranks=2)[0] == pytest.approx([loss] * 4, rel=1e-9)


def one_loss(batch: dict[str, Tensor]) -> float:
    torch.manual_seed(0)
    return float(Scaled().double()(**batch)["loss"])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def evaluated_in_inference_mode(plan):
    """Losses of two steps of one device and of a job whose first call is an evaluation; and that evaluation's."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    model, losses = Residual().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.manual_seed(0)
    job = mw.parallelize(Residual, plan, batch=x, dtype=torch.float64)
    mine = x.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    with torch.inference_mode():
        seen = job.evaluate(mine * 1).item()
        job(mine)
    found = []
    for _ in range(2):
        found.append(job.step(mine).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, seen, found


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"pp": 2}, "microbatches": 2},
        {"mesh": {"dp_shard": 2}},
        *(
            pytest.param({"mesh": {axis: 2}, "microbatches": 2}, marks=pytest.mark.proof)
            for axis in ("tp", "dp_replicate")
        ),
    ],
    ids=str,
)
def test_an_evaluation_in_inference_mode_changes_nothing_of_training(plan, workers):
    for losses, seen, found in workers.run(evaluated_in_inference_mode, plan, ranks=2):
        assert found == pytest.approx(losses, rel=1e-12) and seen == pytest.approx(losses[0], rel=1e-12)
