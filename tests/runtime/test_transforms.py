"""Modules, and buffers, that a forward uses within transforms of ``torch.func`` and functions of its own: physics-informed losses,
penalties on a Jacobian, layers with a backward written by hand."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from test_sharded_units import Block
from torch import Tensor, func, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

PLANS = {
    "tp=2": {"mesh": {"tp": 2}},
    "pp=2": {"mesh": {"pp": 2}, "microbatches": 2},
    "recompute": {"mesh": {"dp_shard": 2}, "recompute": "blocks"},
}


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
    report = mw.check(build, (x,), PLANS[plan], loss=lambda loss: loss, workers=workers, dtype=torch.float64)
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


class Scaled(torch.autograd.Function):
    """Takes a module, whose buffer it reads again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x * module.scale.to(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.module.scale.to(g), None


class Followed(torch.autograd.Function):
    """Takes a module, whose buffer it updates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        module.scale.mul_(0.5).add_(x.mean((0, 1)).to(module.scale))
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 1.5, None


class KeepsScale(nn.Module):
    """A buffer that functions use which do not get it as an argument, and another stage changes.

    Args:
        early, late: called with the module and the activations, before and after most of the blocks.
    """

    def __init__(self, early: Any, late: Any) -> None:
        super().__init__()
        self.early, self.late, self.blocks = early, late, nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(self, self.blocks[0](x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.late(self, x).square().mean()


def update(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.scale.mul_(0.5).add_(x.mean((0, 1)).to(module.scale))
    return x


def vmapped(module: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * (1 + module.scale.to(row)))(x)


def gradient(module: nn.Module, x: Tensor) -> Tensor:
    return x + func.grad(lambda t: (t * module.scale.clone().to(t)).square().sum())(x)


def scaled(module: nn.Module, x: Tensor) -> Tensor:
    return Scaled.apply(x, module)


def followed(module: nn.Module, x: Tensor) -> Tensor:
    return Followed.apply(x, module)


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (vmapped, update),
        (update, scaled),
        pytest.param(gradient, update, marks=pytest.mark.proof),
        pytest.param(update, vmapped, marks=pytest.mark.proof),
        pytest.param(followed, vmapped, marks=pytest.mark.proof),
    ],
)
def test_a_buffer_that_a_function_takes_by_itself_is_that_of_its_last_writer(
    early: Any, late: Any, workers: LocalWorkers
) -> None:
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = mw.check(
        lambda: KeepsScale(early, late), (x,), "pp=2", loss=lambda loss: loss, workers=workers, dtype=torch.float64
    )
    assert report.passed, str(report)


class Assigned(torch.autograd.Function):
    """Takes a module, and assigns its buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        module.scale = module.scale * 0.5 + x.mean((0, 1)).to(module.scale)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 1.5, None


def assigned(module: nn.Module, x: Tensor) -> Tensor:
    return Assigned.apply(x, module)


def assigned_in_grad(module: nn.Module, x: Tensor) -> Tensor:
    def energy(t: Tensor) -> Tensor:
        module.scale = module.scale * 0.5 + t.detach().mean((0, 1)).to(module.scale)
        return (t * (1 + module.scale)).square().sum()

    return x + func.grad(energy)(x)


def counted_in_grad(module: nn.Module, x: Tensor) -> Tensor:
    def energy(t: Tensor) -> Tensor:
        module.count = getattr(module, "count", 0) + 1
        return t.square().sum()

    return x + func.grad(energy)(x)


def times_count(module: nn.Module, x: Tensor) -> Tensor:
    return x * getattr(module, "count", 0)


def unchanged(module: nn.Module, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (assigned_in_grad, unchanged),
        (counted_in_grad, times_count),
        pytest.param(assigned, unchanged, marks=pytest.mark.proof),
        pytest.param(assigned_in_grad, update, marks=pytest.mark.proof),
        pytest.param(assigned_in_grad, vmapped, marks=pytest.mark.proof),
        pytest.param(assigned, scaled, marks=pytest.mark.proof),
        pytest.param(update, assigned, marks=pytest.mark.proof),
    ],
)
def test_what_a_function_assigns_by_itself_is_used_in_its_stage(early: Any, late: Any, workers: LocalWorkers) -> None:
    """What is assigned within a transform is no result of it: a stage without the transform would have an old buffer."""
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = mw.check(
        lambda: KeepsScale(early, late),
        (x,),
        "pp=2",
        loss=lambda loss: loss,
        steps=2,
        workers=workers,
        dtype=torch.float64,
    )
    assert report.passed, str(report)


class Branches(nn.Module):
    """Two branches, one of which changes something by itself that the model uses after it."""

    def __init__(self, early: Any, late: Any) -> None:
        super().__init__()
        self.a, self.b, self.late = KeepsScale(early, unchanged), KeepsScale(unchanged, unchanged), late
        self.a.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + self.late(self.a, x).square().mean()


@pytest.mark.parametrize(("early", "late"), [(assigned_in_grad, vmapped), (counted_in_grad, times_count)])
def test_what_a_function_assigns_in_a_branch_is_refused_if_others_use_it(early: Any, late: Any) -> None:
    plan = {"mesh": "tp=2", "modules": {"a": {"on": "tp[0]"}, "b": {"on": "tp[1]"}}}
    with pytest.raises(mw.PlanError, match="and that is used elsewhere too"):
        mw.make_recipe(lambda: Branches(early, late), plan, batch=(torch.randn(4, 3, 6),))


def test_no_cut_is_made_between_a_function_that_assigns_a_buffer_and_its_uses() -> None:
    class First(KeepsScale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(assigned_in_grad(self, x))

    with pytest.raises(mw.PlanError, match="scale is changed within a function that is not followed"):
        mw.make_recipe(lambda: First(unchanged, update), {"mesh": "pp=2"}, batch=(torch.randn(4, 3, 6),))


class MapsRows(nn.Module):
    """Maps a function over rows, of what is sharded over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        keys, weights = self.inner(x), self.outer.weight.expand(len(x), 6, 8)
        return func.vmap(func.grad(lambda weight, key: (key @ weight.mT).square().sum()))(weights, keys).square().mean()


def step_with_another_vmap() -> list[float]:
    """The losses of one device and of the job, in a process in which a package (tensordict) has replaced a part of vmap."""
    functorch = importlib.import_module("torch._functorch.vmap")
    add, plain = functorch._add_batch_dim, functorch._create_batched_inputs

    def other(in_dims: list[int | None], args: list[Any], level: int, spec: Any) -> Any:
        batched = [a if d is None else add(a, d, level) for d, a in zip(in_dims, args, strict=True)]
        return torch.utils._pytree.tree_unflatten(batched, spec)

    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    functorch._create_batched_inputs = other
    try:
        torch.manual_seed(0)
        expected = MapsRows().double()(x).item()
        plan = {"mesh": "tp=2", "modules": {"inner": {"tp": "column"}}}
        return [expected, mw.parallelize(MapsRows, plan, batch=x, dtype=torch.float64).step(x).item()]
    finally:
        functorch._create_batched_inputs = plain


def test_a_vmap_gets_full_tensors_though_a_package_has_replaced_a_part_of_it(workers: LocalWorkers) -> None:
    for expected, found in workers.run(step_with_another_vmap, ranks=2):
        assert found == pytest.approx(expected, rel=1e-6)
