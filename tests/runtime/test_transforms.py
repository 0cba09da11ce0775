"""Modules that a forward calls within a transform of ``torch.func``: physics-informed losses, penalties on a Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

PLANS = {
    "tp=2": {"mesh": {"tp": 2}},
    "pp=2": {"mesh": {"pp": 2}, "microbatches": 2},
    "recompute": {"mesh": {"dp_shard": 2}, "recompute": "blocks"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Calls its blocks, and one of them within a transform: first there, so that its parameters are first used there."""

    def __init__(self, call: Any, *, of_values: bool = False) -> None:
        super().__init__()
        self.call, self.of_values = call, of_values
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[2](x) if self.of_values else x
        loss = self.call(self.blocks[0], y).square().mean()
        for block in self.blocks:
            y = block(y)
        return loss + y.square().mean()


class PhysicsInformed(nn.Module):
    """u_t = 0.1 u_zz at points (t, z)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points: Tensor) -> Tensor:
        def u(t: Tensor, z: Tensor) -> Tensor:
            return self.net(torch.stack([t, z]))[0]

        u_t, u_zz = func.grad(u), func.grad(func.grad(u, 1), 1)
        residual = torch.vmap(lambda t, z: u_t(t, z) - 0.1 * u_zz(t, z))(points[:, 0], points[:, 1])
        return residual.square().mean() + self.net(points).square().mean()


def grad(block: Any, x: Tensor) -> Tensor:
    return func.grad(lambda t: block(t).square().sum())(x)


def jacrev(block: Any, x: Tensor) -> Tensor:
    return torch.vmap(func.jacrev(lambda row: block(row).sum(0)))(x)


def jvp(block: Any, x: Tensor) -> Tensor:
    return func.jvp(block, (x,), (torch.ones_like(x),))[1]


def vmap(block: Any, x: Tensor) -> Tensor:
    return torch.vmap(block)(x)


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "physics": (PhysicsInformed, (4, 2)),
    **{
        f"{call.__name__} of the batch": (lambda call=call: Blocks(call), (4, 3, 6))
        for call in (grad, jacrev, jvp, vmap)
    },
    **{
        f"{call.__name__} of values": (lambda call=call: Blocks(call, of_values=True), (4, 3, 6))
        for call in (grad, jacrev, jvp, vmap)
    },
}
OFTEN = {("physics", "pp=2"), ("grad of the batch", "tp=2"), ("grad of the batch", "recompute"), ("jacrev of values", "pp=2")}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(case, plan, marks=[] if (case, plan) in OFTEN else [pytest.mark.proof])
        for case in CASES
        for plan in PLANS
    ],
)
def test_a_module_may_be_called_within_a_transform(case: str, plan: str, workers: LocalWorkers) -> None:
    build, shape = CASES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = mw.check(build, (x,), PLANS[plan], loss=lambda loss: loss, workers=workers)
    assert report.passed, str(report)


class Masked(nn.Module):
    """Each block is called under a mask that a transform makes of positions alone."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.blocks = masked, nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        mask = torch.vmap(lambda q: (positions <= q).to(x.dtype))(positions)
        for block in self.blocks:
            x = block(torch.einsum("ts,bsd->btd", mask, x)) if self.masked else block(x)
        return x.square().mean()


def test_what_a_transform_makes_of_the_batch_alone_is_every_stages_own() -> None:
    x = torch.randn(4, 3, 6)
    sent = [
        mw.make_recipe(lambda masked=masked: Masked(masked), {"mesh": "pp=2"}, batch=(x,)).stages[0].sends
        for masked in (False, True)
    ]
    assert sent[0] == sent[1] == x.nbytes
