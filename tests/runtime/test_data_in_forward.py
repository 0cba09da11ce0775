"""A forward that assigns to the data of its parameters, over tp within parts: modes must see the assignment as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


class Block(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.up, self.down, self.change = nn.Linear(8, 16), nn.Linear(16, 8), change

    def forward(self, x: Tensor) -> Tensor:
        getattr(self, self.change)(x)
        return x + self.down(self.up(x).relu())

    def to_where_it_is(self, x: Tensor) -> None:
        self.up.to(x.device)
        self.down.to(x.dtype)

    def normalized(self, x: Tensor) -> None:
        self.down.weight.data = self.down.weight.data / self.down.weight.data.norm(dim=1, keepdim=True)

    def decayed(self, x: Tensor) -> None:
        self.up.bias.data = self.up.bias.data * 0.5 + 0.01


class Net(nn.Module):
    """Blocks that change their parameters, and a layer beside them that takes the same input."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers, self.side = nn.ModuleList(Block(change) for _ in range(4)), nn.Linear(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = x
        getattr(self.layers[-1], self.change)(h)  # outside of a block, whose functions may not be traced
        for layer in self.layers:
            h = layer(h)
        return (h + self.side(x)).square().mean()


INTERLEAVED = {"mesh": "pp=2,tp=2", "microbatches": 2, "schedule": "interleaved", "stages_per_rank": 2}


@pytest.mark.parametrize("change", ["to_where_it_is", "normalized", "decayed"])
@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "tp=3",
        "pp=2,tp=2",
        {"mesh": "tp=2", "modules": {"side": {"on": "tp[1:2]"}}},
        INTERLEAVED,
        "dp_shard=2,tp=2",
    ],
    ids=str,
)
def test_it_is_the_one_devices(change: str, plan: Any, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 8, dtype=torch.float64),)
    report = mw.check(
        partial(Net, change), batch, plan, loss=lambda out: out, dtype=torch.float64, workers=workers, steps=4
    )
    assert report.passed, report


class Follows(nn.Module):
    """A frozen layer follows a trained one, after both were used: backward reads the memory that the layer has now, and a
    checkpoint what its second run has read."""

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.first, self.trained, self.checkpointed = nn.Linear(8, 8), nn.Linear(8, 12), checkpointed
        self.frozen = nn.Linear(8, 12).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.checkpointed:
            h = checkpoint(self.used, h, use_reentrant=self.checkpointed == "reentrant")
        else:
            h = self.used(h)
        return h.square().mean()

    def used(self, h: Tensor) -> Tensor:
        before = self.frozen.weight.data
        out = self.trained(h) * self.frozen(h).sigmoid()
        self.frozen.weight.data = 0.9 * self.frozen.weight.data + 0.1 * self.trained.weight.data
        return out * (1 + before.sum())  # the former memory, with the former values


@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize(
    "plan", ["tp=2", "tp=3", "dp_shard=2", "dp_shard=2,tp=2", "pp=2,tp=2", {"mesh": "tp=2", "microbatches": 2}], ids=str
)
def test_an_assignment_gives_a_parameter_other_memory(plan: Any, checkpointed: str, workers: LocalWorkers) -> None:
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
    report = mw.check(partial(Follows, checkpointed), batch, plan, workers=workers, dtype=torch.float64, steps=4)
    assert report, report


@pytest.mark.parametrize("plan", ["dp_shard=2,tp=2", {"mesh": "tp=2", "microbatches": 2}], ids=str)
def test_a_trial_in_another_type_gives_all_parts_one_memory(plan: Any, workers: LocalWorkers) -> None:
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
    report = mw.check(partial(Follows, ""), batch, plan, workers=workers, dtype=torch.float32, steps=4)
    assert report, report  # else the next forward writes to a part alone, and the parameter stays as it was


def losses_beside_one_device(build: Callable[[], nn.Module], ways: str) -> list[tuple[float, float]]:
    """(of the job, of one device) for forwards of all kinds in turn, each of which changes the parameters; on the first rank.

    Args:
        ways: s: a step; e: an evaluation; n, i: a forward without gradients, and in inference mode.
    """
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    job = mw.parallelize(build, "tp=2", batch=(x,), loss=lambda out: out, dtype=torch.float64)
    values = {line.name: value for line, value in job.full_parameters()}
    one = build().double()
    if job.rank == 0:
        one.load_state_dict(values)
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (job, one)]
    found = []
    for way in ways:
        with torch.inference_mode() if way == "i" else torch.set_grad_enabled(way == "s"):
            forward: Callable[..., Any] = {"s": job.step, "e": job.evaluate}.get(way, lambda batch: job(*batch))
            loss = float(forward((x,)))
        # Not in inference mode: torch itself cannot train what such a forward has assigned.
        with torch.set_grad_enabled(way == "s"):
            found.append((loss, expected := one(x)))
        if way == "s":
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [(loss, float(of_one)) for loss, of_one in found]


@pytest.mark.parametrize("ways", ["ssssess", "isssns", "nseiisss"])
@pytest.mark.parametrize(
    "build", [partial(Net, "decayed"), partial(Net, "normalized"), partial(Follows, "")], ids=range(3)
)
def test_forwards_of_all_kinds_find_what_the_last_one_left(
    build: Callable[[], nn.Module], ways: str, workers: LocalWorkers
) -> None:
    found, _ = workers.run(losses_beside_one_device, build, ways, ranks=2)
    for loss, of_one in found:
        assert loss == pytest.approx(of_one, rel=1e-12)


class Routes(nn.Module):
    """A layer that the forward casts to float32, as routers of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.down = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        self.router.float()
        shares = self.router(h.float()).softmax(-1).to(x.dtype)
        return (self.down(h * shares.max(-1, keepdim=True).values)).square().mean()


@pytest.mark.parametrize(
    "plan", ["tp=2", "tp=3", {"mesh": "tp=2", "modules": {"router": {"tp": "replicate"}}}], ids=str
)
def test_a_layer_computes_in_the_type_to_which_the_forward_casts_it(plan: Any, workers: LocalWorkers) -> None:
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
    plan = {"mesh": plan} if isinstance(plan, str) else plan
    report = mw.check(Routes, batch, {**plan, "precision": "bfloat16"}, workers=workers)
    assert report and any("compared in bfloat16 too" in note for note in report.notes), report
