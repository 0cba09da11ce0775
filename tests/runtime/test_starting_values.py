"""Replicas start alike, also where the constructor of a model does not repeat itself."""

import itertools
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.workers.pool import LocalWorkers


class Unseeded(nn.Module):
    """Draws numbers that no seed reaches."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(os.getpid())
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Parameter(torch.randn(6, generator=own), requires_grad=False)
        self.register_buffer("steps", torch.randint(0, 9, (3,), generator=own))
        self.register_buffer("signs", torch.rand(5, generator=own) > 0.5)
        self.register_buffer("waves", torch.randn(3, generator=own, dtype=torch.complex64).conj())
        self.register_buffer("turned", torch.randn(4, 6, generator=own).t())
        self.register_buffer("seeded", torch.randn(4))
        with torch.no_grad():
            self.norm.weight.add_(torch.randn(6, generator=own))
            self.out.weight.add_(torch.randn(6, 8, generator=own))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            self.norm(x + self.frozen)
            + self.turned.sum(1)
            + self.waves.real.sum()
            + self.steps.sum() * self.signs.sum()
        )
        return (x + self.out(self.inp(x).relu())).square().mean()


def starts(build, mesh: str) -> tuple[dict[str, Tensor], tuple[str, ...], list[float]]:
    x = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=next(build().parameters()).dtype),)
    job = mw.parallelize(build, mesh, batch=x)
    local = {n: local_tensor(p).detach().clone() for n, p in job.named_parameters()} | dict(job.module.named_buffers())
    optimizer, losses = torch.optim.SGD(job.parameters(), lr=0.01), []
    sizes = job.recipe.mesh
    rows = tuple(t.chunk(sizes.data_size)[sizes.data_index(dist.get_rank())] for t in x)
    for _ in range(2):
        losses.append(job.step(rows).item())
        optimizer.step()
        optimizer.zero_grad()
    assert job.guard.last is not None and not job.guard.last.differences
    return local, tuple(note for note in job.notes if "does not repeat itself" in note), losses


REPLICATED = ["norm.weight", "norm.bias", "frozen", "steps", "signs", "waves", "turned", "seeded"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mesh", ["dp_replicate=2", "tp=2", "dp_replicate=2,tp=2", "dp_replicate=2,dp_shard=2"])
def test_replicas_start_alike(mesh: str, dtype: torch.dtype, workers: LocalWorkers) -> None:
    ranks = mw.Plan.parse(mesh).mesh.size
    of_ranks = workers.run(starts, partial(Unseeded, dtype), mesh, ranks=ranks)
    names = [n for n in REPLICATED if "dp_shard" not in mesh or ("norm" not in n and n != "frozen")]
    for local, notes, losses in of_ranks:
        assert notes == of_ranks[0][1] and len(notes) == 1 and "the lowest rank" in notes[0]
        assert losses == of_ranks[0][2]
        for name in names:
            assert torch.equal(local[name], of_ranks[0][0][name]), name
    if mesh == "dp_replicate=2":
        assert torch.equal(of_ranks[0][0]["out.weight"], of_ranks[1][0]["out.weight"])
    if "dp_shard" in mesh:  # ranks 0 and 2, and 1 and 3, hold the same shards
        for name in ("norm.weight", "out.weight", "frozen"):
            assert torch.equal(of_ranks[0][0][name], of_ranks[2][0][name])
            assert torch.equal(of_ranks[1][0][name], of_ranks[3][0][name])


class Tied(nn.Module):
    """A parameter that the first and the last stage hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.tokens.weight
        with torch.no_grad():
            self.head.weight.add_(torch.randn(12, 6, generator=torch.Generator().manual_seed(os.getpid())))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens((x[:, :1] > 0).long()[:, 0]) + x
        for layer in self.layers:
            h = layer(h).tanh()
        return self.head(h).square().mean()


def test_what_stages_share_starts_alike(workers: LocalWorkers) -> None:
    (first, notes, _), (last, _, _) = workers.run(starts, Tied, "pp=2", ranks=2)
    assert torch.equal(
        first["tokens.weight"], last["tokens.weight"] if "tokens.weight" in last else last["head.weight"]
    )
    assert "tokens.weight" in notes[0]


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).square().mean()


def sent(mesh: str) -> int:
    calls, send = [], dist.send
    dist.send = lambda *args, **kwargs: (calls.append(args), send(*args, **kwargs))
    try:
        assert not starts(Seeded, mesh)[1]
    finally:
        dist.send = send
    return len(calls)


def test_nothing_is_sent_where_ranks_have_built_the_same(workers: LocalWorkers) -> None:
    assert workers.run(sent, "dp_replicate=2", ranks=2) == [0, 0]


BUILT = itertools.count(1)


class PerBuild(nn.Module):
    """Each model that is built has other values, by 1e-6, as LAPACK may round otherwise."""

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__()
        self.lin, self.wrong = nn.Linear(6, 6), wrong
        with torch.no_grad():
            self.lin.weight.add_(1e-6 * next(BUILT))

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + 1e-3 * dist.get_world_size() if self.wrong and dist.is_initialized() else 1
        return self.lin(x).square().mean() * factor


@pytest.mark.parametrize("mesh", ["tp=2", "dp_replicate=2"])
def test_a_check_starts_both_sides_alike(mesh: str, workers: LocalWorkers) -> None:
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),)
    report = mw.check(PerBuild, batch, mesh, workers=workers)
    assert report, report
    assert [note for note in report.notes if "built again on one device, lin.weight differ" in note]


def test_a_check_of_a_wrong_job_fails_whatever_the_constructor_does(workers: LocalWorkers) -> None:
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),)
    report = mw.check(partial(PerBuild, wrong=True), batch, "dp_shard=2", workers=workers)
    assert not report and [note for note in report.notes if "built again on one device" in note]
