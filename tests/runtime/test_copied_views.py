"""Writes to slices of sharded tensors, and to their ``data``: as on one device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_redistribution import BATCH, job_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshwright as mw
from meshwright.private import dtensor_handlers
from meshwright.runtime.weights.copied_views import CopiedView
from meshwright.workers.pool import LocalWorkers


def assigned(w: Any, where: Any, value: Any) -> None:
    w[where] = value


def overlapping(w: Any) -> None:
    torch._foreach_mul_([w[0], w[:3]], 0.5)


def kept(w: Any) -> None:
    first = w[:7]
    second = first[2:4]
    second.mul_(0.5)
    w[-7:].copy_(first * 3)
    first[3].zero_()
    w[0].copy_(second[1])


def on_all_ranks(w: Any) -> Any:
    """A copy that all ranks have whole."""
    return (
        w.redistribute(placements=[Replicate()] * w.device_mesh.ndim).clone() if isinstance(w, DTensor) else w.clone()
    )


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w[5].zero_(),
    "a row of data": lambda w: w.data[0].fill_(0),
    "a row of a detached one": lambda w: w.detach()[0].zero_(),
    "rows": lambda w: w[:2].mul_(0.9),
    "rows *=": lambda w: assigned(w, slice(0, 2), w[:2] * 0.9),
    "rows =": lambda w: assigned(w, slice(2, 5), 1.0),
    "every second row": lambda w: w[::2].zero_(),
    "a row = another": lambda w: assigned(w, 0, w[1] * 2),
    "a column": lambda w: w[:, 0].zero_(),
    "a column = a number": lambda w: assigned(w, (slice(None), 0), 0.0),
    "columns": lambda w: w.chunk(2, 1)[1].mul_(3),
    "an element": lambda w: assigned(w, (0, 0), 1.0),
    "an element of a row": lambda w: w[0][1].zero_(),
    "rows by number": lambda w: assigned(w, [0, 3], 0.0),
    "a mask": lambda w: assigned(w, w > 0, 0.0),
    "chunks": lambda w: [t.mul_(i) for i, t in enumerate(w.chunk(3))],
    "splits": lambda w: w.split([1, 35] if len(w) == 36 else [1, 11])[1].mul_(0.9),
    "tensor_split": lambda w: w.tensor_split(2)[0].zero_(),
    "narrow": lambda w: w.narrow(0, 2, 3).zero_(),
    "diagonal": lambda w: w.diagonal().fill_(1.0),
    "flat": lambda w: w.view(-1)[:4].mul_(0.9),
    "flattened": lambda w: w.flatten().clamp_(-0.1, 0.1),
    "flat rows": lambda w: w[:3].view(-1).mul_(0.5),
    "unflattened": lambda w: w.unflatten(0, (2, -1))[1].mul_(0.9),
    "transposed": lambda w: w.t()[0].zero_(),
    "triu_": lambda w: w.triu_(),
    "renorm_": lambda w: w.renorm_(2, 0, 0.5),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([1]), 0.0),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 12, dtype=torch.long), 0.0),
    "eye_": lambda w: nn.init.eye_(w),
    "out": lambda w: torch.mul(w[0], 2, out=w[1]),
    "lists": lambda w: torch._foreach_mul_([w[0], w[2:4]], 0.5),
    "whole, by a mask": lambda w: w.copy_(on_all_ranks(w).masked_fill_(w > 0, torch.tensor(0.5, dtype=w.dtype))),
    "whole, by a product": lambda w: w.mul_(on_all_ranks(w).sum(1).addmv_(w, w[0]).cos()[:, None]),
    "overlapping": overlapping,
    "kept": kept,
    "data = its product": lambda w: setattr(w, "data", w.data * 0.9),
    "data = plain": lambda w: setattr(w, "data", torch.ones(w.shape, dtype=w.dtype)),
}


def lost(mesh: str) -> dict[str, str]:
    job, found = job_of(mesh, 3), {}
    named = dict(job.named_parameters())
    job.step((BATCH[: 4 // job.recipe.mesh.data_size],))
    for name in ("qkv.weight", "out.weight"):
        for t in (named[name], named[name].grad):
            for label, write in WRITES.items():
                one = t.full_tensor().detach().clone()
                try:
                    with torch.no_grad():
                        write(one)
                        write(t)
                    torch.testing.assert_close(t.full_tensor().detach(), one)
                except Exception as error:
                    found[f"{label} of {name}"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(
    ("mesh", "ranks"), [("dp_shard=2", 2), ("tp=2", 2), ("dp_shard=2,tp=2", 4), ("dp_replicate=2,dp_shard=2", 4)]
)
def test_no_write_is_lost(fresh: LocalWorkers, mesh: str, ranks: int) -> None:
    found = fresh.run(lost, mesh, ranks=ranks)
    assert found == [{}] * ranks, found[0]


class Padded(nn.Module):
    """Row 0 of the embedding is set to zero after each step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.scale = nn.Parameter(torch.ones(()))  # FSDP2 divides no scalars: no DTensor there

    def forward(self, ids: Tensor) -> Tensor:
        return (self.out(self.embedding(ids)) * self.scale).square().mean()


def trained(parameters: dict[str, Any], step: Callable[[], Any]) -> None:
    optimizer = torch.optim.Adam(parameters.values(), lr=0.1)
    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
        parameters["embedding.weight"].data[0].zero_()
        parameters["out.bias"].data = parameters["out.bias"].data * 0.5
        vector = nn.utils.parameters_to_vector(parameters.values())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, parameters.values())


IDS = torch.arange(8).view(4, 2) % 5


def trained_over(mesh: str) -> dict[str, Any]:
    job = mw.parallelize(Padded, mesh, batch=(IDS,), loss=lambda out: out, dtype=torch.float64)
    rows = IDS.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    trained(dict(job.named_parameters()), lambda: job.step((rows,)))
    return {recipe.name: p for recipe, p in job.full_parameters()}


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_training_is_that_of_one_device(fresh: LocalWorkers, mesh: str) -> None:
    torch.manual_seed(0)
    model = Padded().double()
    trained(dict(model.named_parameters()), lambda: model(IDS).backward())
    result, _ = fresh.run(trained_over, mesh, ranks=2)
    for name, p in model.named_parameters():
        torch.testing.assert_close(result[name], p.detach())


def averaged(parameters: dict[str, Any], step: Callable[[], Any], tied: bool) -> list[Tensor]:
    """Averages take the place of parameters for a while, as in many scripts; what shares memory goes on sharing it."""
    optimizer, told = torch.optim.SGD(parameters.values(), lr=0.5, momentum=0.5), []
    averages = {name: p.data.clone() for name, p in parameters.items()}

    def train() -> None:
        told.append(step())
        optimizer.step()
        optimizer.zero_grad()

    train()
    kept = {name: p.data for name, p in parameters.items()}
    row = parameters["out.weight"].detach()[1]
    for name, p in parameters.items():
        averages[name].lerp_(p.data, 0.3)
        p.data = averages[name]
    train()  # the averages share the memory of the parameters
    train()
    told.extend(whole(averages))
    with torch.no_grad():
        row.zero_()  # of the former memory
        averages["out.weight"].mul_(0.5)  # of the parameter's
    train()
    for name, p in parameters.items():
        p.data, averages[name] = kept[name], p.data
    for _ in range(4):
        train()
    told.extend(whole(averages))
    if tied:
        parameters["out.weight"].data = parameters["embedding.weight"].data  # one memory from now on
    for _ in range(2):
        train()
    return [*told, *whole(parameters)]


def whole(tensors: dict[str, Any]) -> list[Tensor]:
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for _, t in sorted(tensors.items())]


def averaged_over(mesh: str, tied: bool) -> list[Tensor]:
    job = mw.parallelize(Padded, mesh, batch=(IDS,), loss=lambda out: out, dtype=torch.float64)
    rows = IDS.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    return averaged(dict(job.named_parameters()), lambda: job.step((rows,)), tied)


@pytest.mark.parametrize(("mesh", "ranks"), [("dp_shard=2", 2), ("tp=2", 2), ("dp_shard=2,tp=2", 4)])
def test_what_shared_memory_before_data_was_assigned_keeps_its_values(
    fresh: LocalWorkers, mesh: str, ranks: int
) -> None:
    torch.manual_seed(0)
    model = Padded().double()

    def step() -> Tensor:
        loss = model(IDS)
        loss.backward()
        return loss.detach()

    tied = "tp" not in mesh  # over tp the two are cut in different ways: a copy
    expected = averaged(dict(model.named_parameters()), step, tied)
    for told in fresh.run(averaged_over, mesh, tied, ranks=ranks):
        assert len(told) == len(expected)
        for now, one in zip(told, expected, strict=True):
            torch.testing.assert_close(now, one)


def what_views_are() -> list[Any]:
    job = job_of("dp_shard=2", 3)
    w = dict(job.named_parameters())["qkv.weight"].detach()
    row, file = w[0], io.BytesIO()
    torch.save(row, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    told: list[Any] = [type(t) for t in (row, row * 2, copy.deepcopy(row), loaded, w[:, 1:])]
    told.append(torch.equal(loaded.full_tensor(), w.full_tensor()[0]))
    for value in (w.data[:3], torch.ones(36, 12), "text"):
        try:
            w.data = value
        except mw.PlanError as error:
            told.append(str(error))
    w[4].copy_(torch.arange(12.0))
    told.append(w.full_tensor()[4].tolist() == list(range(12)))
    torch.manual_seed(0)
    w[3].normal_()
    told.append(w.full_tensor()[3].tolist())
    return told


def test_a_view_is_a_dtensor_and_a_copy_of_it_plain(fresh: LocalWorkers) -> None:
    one, other = fresh.run(what_views_are, ranks=2)
    assert one == other and one[:5] == [CopiedView, DTensor, DTensor, DTensor, DTensor] and one[5]
    for refused, given in zip(one[6:9], ("shape (3, 12)", "torch.float32", "str"), strict=True):
        assert "data of a sharded parameter or gradient" in refused and given in refused
    assert one[-2] and len(one[-1]) == 12 and len(set(one[-1])) == 12


def without_a_job() -> tuple[bool, bool, bool]:
    """Whether torch loses a write to a row and an assignment to data; whether its handlers are its own."""
    w = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    w[0].zero_()
    row = bool(w.full_tensor().all())
    w.data = w * 2
    return row, bool((w.full_tensor() == 1).all()), torch.ops.aten.slice.Tensor not in dtensor_handlers()


def test_torch_itself_loses_what_is_written(fresh: LocalWorkers) -> None:
    """If torch changes this, ``copied_views`` may go."""
    assert fresh.run(without_a_job, ranks=2) == [(True, True, True)] * 2
