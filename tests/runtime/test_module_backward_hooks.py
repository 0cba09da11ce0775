"""Backward hooks of modules that take and return several tensors, in parts: torch makes one node for the inputs of such a module,
and one for its outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(h).tanh() + self.b(x), h * 2


def halved(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in of_inputs)


def smaller(module: nn.Module, of_outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.7 for g in of_outputs)


class Net(nn.Module):
    """``side`` gives what pairs take, beside what the pair before gives. ``hooked``: after the pairs, before them, or on layers."""

    def __init__(self, hooked: str) -> None:
        super().__init__()
        self.first, self.side, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.pairs = nn.ModuleList(Pair() for _ in range(3))
        for pair in self.pairs:
            if hooked == "after":
                pair.register_full_backward_hook(halved)
            elif hooked == "before":
                pair.register_full_backward_pre_hook(smaller)
            else:
                pair.a.register_full_backward_hook(halved)
        if hooked == "layers":
            self.side.register_full_backward_hook(halved)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        s = self.side(h)
        for pair in self.pairs:
            h, extra = pair(h, s)
            s = s + extra
        return (self.last(h) + s).square().mean()


BRANCH = {"side": {"on": "tp[1:2]"}}
PLANS: list[Any] = [
    "pp=2",
    {"mesh": "pp=2,tp=2", "microbatches": 2},
    {"mesh": "tp=2", "modules": BRANCH},
    {"mesh": "dp_shard=2,tp=2", "modules": BRANCH},
    {"mesh": "tp=4", "modules": {"side": {"on": "tp[2:4]", "mesh": {"dp_shard": 2}}}},
]


@pytest.mark.parametrize("hooked", ["after", "before", "layers"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gradients_pass_through_them_as_on_one_device(hooked: str, plan: Any, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 8, dtype=torch.float64),)
    report = mw.check(
        partial(Net, hooked), batch, plan, loss=lambda out: out, dtype=torch.float64, workers=workers, steps=2
    )
    assert report.passed, report
