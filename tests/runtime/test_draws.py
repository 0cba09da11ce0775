"""Random numbers that a script draws for sharded parameters between steps: those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_redistribution import BATCH, job_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


def with_generator(w: Any) -> Any:
    return w.normal_(generator=torch.Generator().manual_seed(5))


DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda w: w.normal_(1, 2),
    "uniform_": lambda w: w.uniform_(-1, 1),
    "with a generator": with_generator,
    "bernoulli_": lambda w: w.bernoulli_(0.3),
    "bernoulli_ of tensors": lambda w: w.bernoulli_(w.sigmoid()),
    "bernoulli": lambda w: w.copy_(torch.bernoulli(w.sigmoid())),
    "exponential_": lambda w: w.exponential_(),
    "log_normal_": lambda w: w.log_normal_(),
    "cauchy_": lambda w: w.cauchy_(),
    "geometric_": lambda w: w.geometric_(0.3),
    "random_": lambda w: w.random_(7),
    "random_ from": lambda w: w.random_(3, 9),
    "rand_like": lambda w: w.add_(torch.rand_like(w)),
    "randn_like": lambda w: w.add_(torch.randn_like(w), alpha=0.1),
    "randint_like": lambda w: w.add_(torch.randint_like(w, 2, 9)),
    "dropout": lambda w: w.copy_(nn.functional.dropout(w, 0.4)),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w),
    "xavier": lambda w: nn.init.xavier_normal_(w),
    "another type": lambda w: w.add_(torch.randn_like(w, dtype=torch.float32)),
}


def drawn(mesh: str, seeded: bool) -> dict[str, str]:
    """What differs from one device; or, without a seed, between ranks that have the same part."""
    job, found = job_of(mesh, 3), {}
    named = dict(job.named_parameters())
    job.step((BATCH[: 4 // job.recipe.mesh.data_size],))
    for name in ("qkv.weight", "out.weight"):
        w: Any = named[name]
        for label, draw in DRAWS.items():
            one = w.full_tensor().detach().clone()
            try:
                with torch.no_grad():
                    if seeded:
                        torch.manual_seed(3)
                    draw(w)
                    whole = w.full_tensor()
                    if seeded:
                        torch.manual_seed(3)
                        draw(one)
                        torch.testing.assert_close(whole, one)
                    wholes = [torch.empty_like(whole) for _ in range(torch.distributed.get_world_size())]
                    torch.distributed.all_gather(wholes, whole.contiguous())
                    assert all(torch.equal(other, whole) for other in wholes), "ranks differ"
                    halves = whole[: len(whole) // 2], whole[len(whole) // 2 :]
                    assert not torch.equal(*halves), "both halves are the same"
            except Exception as error:
                found[f"{label} of {name}"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("dp_shard=2", 2),
        ("tp=2", 2),
        ("dp_shard=2,tp=2", 4),
        pytest.param("dp_replicate=2,dp_shard=2", 4, marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("seeded", [True, False])
def test_numbers_are_those_of_one_device_and_the_same_on_all_ranks(
    fresh: LocalWorkers, mesh: str, ranks: int, seeded: bool
) -> None:
    found = fresh.run(drawn, mesh, seeded, ranks=ranks)
    assert found == [{}] * ranks, found[0]


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 5)
        for p in self.body.parameters():
            nn.init.constant_(p, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x))).square().mean()


def fine_tuned(module: Any, step: Callable[[], Any]) -> list[float]:
    """The head starts anew, with random numbers in which the forward goes on."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    torch.manual_seed(1)
    for i in range(5):
        if i in (0, 2):
            module.head.reset_parameters()
        losses.append(float(step()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


ROWS = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 10


def fine_tuned_over(mesh: str) -> list[float]:
    job = mw.parallelize(Headed, mesh, batch=(ROWS,), loss=lambda out: out, dtype=torch.float64)
    return fine_tuned(job.module, lambda: job.step((ROWS,)))


def test_over_tp_training_goes_on_in_the_numbers_of_one_device(fresh: LocalWorkers) -> None:
    model = Headed().double()

    def step() -> Tensor:
        loss = model(ROWS)
        loss.backward()
        return loss.detach()

    expected = fine_tuned(model, step)
    for losses in fresh.run(fine_tuned_over, "tp=2", ranks=2):
        assert losses == pytest.approx(expected)


def without_a_job() -> bool:
    """Whether torch fills both parts of a tensor with the same numbers."""
    torch.manual_seed(0)
    w: Any = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    whole = w.normal_().full_tensor()
    return isinstance(w, DTensor) and torch.equal(whole[:2], whole[2:])


def test_torch_itself_draws_for_each_part(fresh: LocalWorkers) -> None:
    """If torch changes this, ``draws`` may go."""
    assert fresh.run(without_a_job, ranks=2) == [True, True]
