"""A forward that assigns to the data of its parameters, over tp within parts: modes must see the assignment as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    ["pp=2,tp=2", {"mesh": "tp=2", "modules": {"side": {"on": "tp[1:2]"}}}, INTERLEAVED, "dp_shard=2,tp=2"],
    ids=str,
)
def test_it_is_the_one_devices(change: str, plan: Any, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 8, dtype=torch.float64),)
    report = mw.check(
        partial(Net, change), batch, plan, loss=lambda out: out, dtype=torch.float64, workers=workers, steps=4
    )
    assert report.passed, report
