"""Sums over ``dp_replicate`` alone: in buckets, while the backward runs; the gradients are those of one device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.runtime.weights import buckets
from meshwright.workers.pool import LocalWorkers

SMALL = 120  # bytes of a bucket: two or three parameters of these models
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Blocks(nn.Module):
    """Blocks, of which the last is not used, with a frozen parameter and one of another type."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.odd = nn.Parameter(torch.ones(4, dtype=torch.complex128))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant and x.requires_grad else block(x)
            x = x.tanh() * self.scale * self.frozen
        return (x + (x * self.odd).abs()).square().mean()


class Twice(Blocks):
    """Each weight is used twice, by blocks that a backward within the backward runs: its gradient comes in parts."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(1))


class Chosen(Blocks):
    """Which blocks are used follows from the rows: each rank may use another one."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            picked = (x[:, 0] > 0) == bool(number % 2)
            if picked.any():
                x = x.index_put((picked.nonzero()[:, 0],), block(x[picked]).tanh())
        return x.square().mean()


def itself(loss: Tensor) -> Tensor:
    return loss


def one_device(kind: type[Blocks], steps: int, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = kind().double()
    for _ in range(steps):
        model(x).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def in_buckets(kind: type[Blocks], plan: dict[str, Any], steps: int, x: Tensor) -> tuple[dict[str, Any], int]:
    """Gradients after some steps without ``zero_grad``; the number of all-reduces that began before the backwards ended."""
    torch.manual_seed(0)
    before, after = 0, False
    launch, finish = buckets.Buckets._launch, buckets.Buckets.finish

    def launched(self: Any, bucket: Any) -> None:
        nonlocal before
        before += not after
        launch(self, bucket)

    def finished(self: Any, on_any: Any) -> None:
        nonlocal after
        after = True
        finish(self, on_any)
        after = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets.Buckets, "_launch", launched)
        patch.setattr(buckets.Buckets, "finish", finished)
        patch.setattr(buckets.Buckets.__init__, "__kwdefaults__", {"size": SMALL})
        job = mw.parallelize(kind, plan, batch=(x,), loss=itself, dtype=torch.float64)
        for _ in range(steps):
            job.step(rows_of_rank((x,), job.recipe, job.rank))
    return {name: p.grad for name, p in job.named_parameters()}, before


@pytest.mark.parametrize("kind", [Blocks, Twice, Chosen])
@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ({"mesh": "dp_replicate=2"}, 8),
        ({"mesh": "dp_replicate=2", "microbatches": 2, "rows": "split"}, 8),
        ({"mesh": "dp_replicate=3", "rows": "split"}, 8),
        ({"mesh": "dp_replicate=2", "recompute": "blocks"}, 8),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(workers: LocalWorkers, kind: Any, plan: dict[str, Any], rows: int) -> None:
    ranks = int(plan["mesh"][-1])
    expected = one_device(kind, 2, X[:rows])
    for gradients, before in workers.run(in_buckets, kind, plan, 2, X[:rows], ranks=ranks):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient is None:
                assert gradients[name] is None, name
            else:
                assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-12), (name, plan)
        assert before > 0 or kind is Chosen


def plain() -> tuple[list[str], list[str]]:
    """Types of a job's parameters; the hooks on them while it lives."""
    job = mw.parallelize(Blocks, "dp_replicate=2", batch=(X,), loss=itself, dtype=torch.float64)
    mine = rows_of_rank((X,), job.recipe, job.rank)
    job.step(mine)
    for p in job.module.blocks[1].parameters():
        p.requires_grad_(False)
    job.module.frozen.requires_grad_(True)
    job.module.zero_grad()
    job.step(mine)
    dist.barrier()
    return sorted({type(p).__name__ for p in job.parameters()}), [
        n for n, p in job.named_parameters() if p.grad is not None
    ]


def test_parameters_stay_plain_and_may_be_frozen_and_thawed(workers: LocalWorkers) -> None:
    for types, with_gradient in workers.run(plain, ranks=2):
        assert types == ["Parameter"]
        assert (
            "frozen" in with_gradient and "blocks.1.weight" not in with_gradient and "blocks.0.weight" in with_gradient
        )


def is_freed() -> bool:
    job = mw.parallelize(Blocks, "dp_replicate=2", batch=(X,), loss=itself, dtype=torch.float64)
    job.step(rows_of_rank((X,), job.recipe, job.rank))
    parameter = weakref.ref(job.module.blocks[0].weight)
    del job
    gc.collect()
    return parameter() is None


def test_a_job_that_is_gone_keeps_no_parameters(workers: LocalWorkers) -> None:
    assert all(workers.run(is_freed, ranks=2))


def test_buckets_are_filled_from_the_end_and_by_type() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 4}
    parameters = {name: nn.Parameter(torch.zeros(size, dtype=torch.float64)) for name, size in sizes.items()}
    parameters["half"] = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    divided = buckets._divided(parameters, 64)
    assert [bucket.names for bucket in divided] == [["half"], ["d"], ["c"], ["b", "a"]]
