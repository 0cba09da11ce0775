"""Parts of a model that ``torch.compile`` or ``torch.jit`` made: right in every layout; whether they stay compiled is noted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

compiled = partial(torch.compile, backend="eager")  # Dynamo is what goes wrong; what it hands its graphs to is slow


def both(t: Tensor) -> Tensor:
    """Two functions that one rule answers."""
    return F.gelu(t) * torch.sigmoid(t) + torch.tanh(t).abs()


class Both(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return both(t)


class Scale(nn.Module):
    """Has a buffer, and may write to it."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 1.5))
        self.writes = writes

    def forward(self, t: Tensor) -> Tensor:
        if self.writes:
            self.scale.mul_(0.9).add_(t.detach().mean() * 0.1)
        return t * self.scale


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] = both) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 16), nn.Linear(16, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(x)))


class ByMethod(Block):
    @compiled
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down(F.gelu(h) * torch.sigmoid(h) + torch.tanh(h).abs())


def _by_call() -> nn.Module:
    block = Block()
    block.compile(backend="eager")
    return block


BLOCKS: dict[str, Callable[[], Any]] = {
    "function": lambda: Block(compiled(both)),
    "method": ByMethod,
    "module.compile()": _by_call,
    "submodule, fullgraph": lambda: compiled(Block(), fullgraph=True),
    "scripted function": lambda: Block(torch.jit.script(both)),
    "scripted module": lambda: Block(torch.jit.script(Both())),
    "traced module": lambda: Block(torch.jit.trace(Both(), torch.ones(2, 3, 16))),
    "scripted, reads a buffer": lambda: Block(torch.jit.script(Scale(False))),
    "scripted, writes to a buffer": lambda: Block(torch.jit.script(Scale(True))),
    "max-autotune": lambda: torch.compile(Block(), mode="max-autotune"),
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BLOCKS[kind]() for _ in range(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x), labels))


def batch() -> dict[str, Tensor]:
    """Of the rows, one is ignored: the halves' means are not the whole's."""
    return {
        "x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),
        "labels": torch.tensor([1, 2, 3, -100]),
    }


PLANS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "dp_shard": {"mesh": {"dp_shard": 2}},
    "pp": {"mesh": {"pp": 2}},
    "tp, recompute": {"mesh": {"tp": 2}, "recompute": "blocks"},
    "pp, recompute": {"mesh": {"pp": 2}, "recompute": "blocks"},
}


def _cases() -> list[Any]:
    cheap = {
        ("method", "tp"),
        ("submodule, fullgraph", "tp"),
        ("module.compile()", "dp_shard"),
        ("scripted function", "pp"),
        ("scripted, writes to a buffer", "dp_shard"),
    }
    return [
        pytest.param(kind, plan, marks=() if (kind, plan) in cheap else pytest.mark.proof)
        for kind in BLOCKS
        for plan in PLANS
        if not (kind.startswith("scripted,") and plan.startswith("pp"))
    ]  # fmt: skip


@pytest.mark.parametrize("kind,plan", _cases())
def test_a_compiled_part_gives_what_it_gives_on_one_device(kind: str, plan: str, workers: LocalWorkers) -> None:
    report = mw.check(partial(Model, kind), batch(), PLANS[plan], workers=workers, dtype=torch.float64, steps=2)
    assert report, report
    notes = "\n".join(report.recipe.notes)
    if kind.startswith(("scripted", "traced")):
        assert "compile" not in notes
    elif plan == "dp_shard":
        assert "stays compiled" in notes and "blocks.{0…1}" in notes
    else:
        assert "torch.compile is off" in notes and "blocks.{0…1}" in notes


@pytest.mark.parametrize("kind", ["scripted, reads a buffer", "scripted, writes to a buffer"])
def test_a_scripted_module_with_buffers_is_refused_in_a_pipeline(kind: str, workers: LocalWorkers) -> None:
    with pytest.raises(mw.PlanError, match="with buffers of its own"):
        mw.check(partial(Model, kind), batch(), PLANS["pp"], workers=workers, dtype=torch.float64)
