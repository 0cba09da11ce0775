"""What a person sets on a model between steps: flags, numbers, hooks. As on one device, or one error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import RowsError
from meshwright.switches import Switches
from meshwright.workers.pool import LocalWorkers

ROWS, WIDTH, AT, STEPS = 8, 6, 2, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.centred = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        return x + self.down(h - h.mean(0) if self.centred else h)


class Model(nn.Module):
    """Its flags and numbers are those of one that trains by a curriculum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 1)
        self.gain, self.weight, self.skipped = 1.0, 0.0, -1
        self.config = SimpleNamespace(centred=False)
        self.channels: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                out = block(out)
            if self.gain != 1:
                out = out * self.gain
        if self.config.centred:
            out = out - out.mean(0)
        if self.channels is not None:
            out = out * self.channels
        loss = self.head(out).square().mean()
        return loss + self.weight * out.mean(0).square().sum() if self.weight else loss


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def halved(module: nn.Module, given: Any, of_outputs: Any) -> Any:
    return tuple(None if g is None else g / 2 for g in given)


def put(module: nn.Module, **switches: Any) -> None:
    for name, value in switches.items():
        setattr(module, name, value)


def clamped(g: Tensor) -> Tensor:
    return g.clamp(-0.01, 0.01)


def hook_parameters(model: Any) -> None:
    for p in model.parameters():
        p.register_hook(clamped)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a gain": lambda model: put(model, gain=0.5),
    "a tensor": lambda model: put(model, channels=torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)),
    "a block is skipped": lambda model: put(model, skipped=2),
    "a forward hook": lambda model: model.blocks[1].register_forward_hook(lambda m, given, out: out / 2),
    "a hook before": lambda model: model.blocks[2].register_forward_pre_hook(lambda m, given: (given[0] / 2,)),
    "a backward hook": lambda model: model.blocks[1].register_full_backward_hook(halved),
    "a backward hook of the head": lambda model: model.head.register_full_backward_hook(halved),
    "a hook on a parameter": lambda model: model.blocks[3].up.weight.register_hook(clamped),
    "hooks on all parameters": hook_parameters,
    "a block couples rows": lambda model: put(model.blocks[1], centred=True),
    "a weight couples rows": lambda model: put(model, weight=0.5),
    "a configuration couples rows": lambda model: put(model.config, centred=True),
    "a hook couples rows": lambda model: model.head.register_forward_hook(lambda m, given, out: out - out.mean(0)),
}
COUPLE = [change for change in CHANGES if "couple" in change]
COMPUTING = "a forward hook", "a hook before", "a hook couples rows"  # forward hooks


def train(model: Any, step: Callable[[Tensor], Tensor], change: str) -> list[float]:
    losses, handle = [], None
    for i in range(STEPS):
        if i == AT:
            handle = CHANGES[change](model)
        if i == STEPS - 1 and handle is not None:
            handle.remove()  # type: ignore[attr-defined]
        losses.append(float(step(rows(i))))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
    return losses


def one_device(change: str) -> list[float]:
    torch.manual_seed(0)
    model = Model().double()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        return loss.detach()

    return train(model, step, change)


def over_devices(changes: list[str], plan: dict[str, Any]) -> list[tuple[list[float], str]]:
    """Runs on every rank: losses, or the error, of each change."""
    found = []
    for change in changes:
        job = mw.parallelize(lambda: Model().double(), {**plan, "seed": 0}, batch=rows(0), timeout=20)
        ranks, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)

        def step(x: Tensor, job: Any = job, ranks: int = ranks, index: int = index) -> Tensor:
            loss: Tensor = job.step(x.chunk(ranks)[index])
            return loss

        try:
            found.append((train(job.module, step, change), ""))
        except RowsError as error:
            found.append(([], str(error)))
    return found


PLANS = [{"mesh": "pp=2", "microbatches": 2}, {"mesh": "dp_shard=2"}]
MORE = [{"mesh": "tp=2", "microbatches": 2}, {"mesh": "dp_replicate=2"}]
USUAL = [
    (PLANS[0], ["a block is skipped", "a configuration couples rows"]),
    (PLANS[1], ["hooks on all parameters", "a weight couples rows"]),
]


@pytest.mark.parametrize(
    ("plan", "changes"),
    [*USUAL, *(pytest.param(plan, list(CHANGES), marks=pytest.mark.proof) for plan in (*PLANS, *MORE))],
    ids=str,
)
def test_what_is_set_between_steps_is_as_on_one_device_or_an_error(
    plan: dict[str, Any], changes: list[str], workers: LocalWorkers
) -> None:
    changes = [change for change in changes if plan["mesh"] != "pp=2" or change not in COMPUTING]
    for found in workers.run(over_devices, changes, plan, ranks=2):
        for change, (losses, error) in zip(changes, found, strict=True):
            if change in COUPLE:
                assert "something was set on it" in error and "rows: whole" in error, change
            else:
                assert losses == pytest.approx(one_device(change), rel=1e-9), change


class Masked(nn.Module):
    """A mean of those rows alone whose first number is below a threshold, of which another is set before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.below = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), 5.0

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[:, :1] < self.below).to(x.dtype)
        off = (self.down(torch.tanh(self.up(x))) - 1).square()
        return (off * mask).sum() / mask.sum()


def with_thresholds(plan: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of one device, and of a job, in ten steps."""
    torch.manual_seed(0)
    model = Masked().double()
    job = mw.parallelize(lambda: Masked().double(), {**plan, "seed": 0}, batch=rows(0), timeout=20)
    ranks, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
    one, found = list[float](), list[float]()
    for i in range(10):
        model.below = job.module.below = 1.5 - i / 7
        one.append(float(model(rows(i))))
        found.append(float(job.step(rows(i).chunk(ranks)[index])))
    return one, found


@pytest.mark.parametrize("plan", [PLANS[0], {"mesh": "dp_replicate=2"}], ids=str)
def test_a_mask_that_follows_from_a_switch_is_counted_as_it_is_now(plan: dict[str, Any], workers: LocalWorkers) -> None:
    for one, found in workers.run(with_thresholds, plan, ranks=2):
        assert found == pytest.approx(one, rel=1e-9)


def stopped_by_a_hook(change: str) -> str:
    job = mw.parallelize(lambda: Model().double(), PLANS[0], batch=rows(0), timeout=5)
    job.step(rows(0))
    CHANGES[change](job.module)
    with pytest.raises(RuntimeError) as error:
        job.step(rows(1))
    return str(error.value)


@pytest.mark.proof  # it waits for a timeout
@pytest.mark.parametrize("change", COMPUTING)
def test_a_forward_hook_that_computes_and_comes_late_is_an_error_over_stages(
    change: str, workers: LocalWorkers
) -> None:
    errors = workers.run(stopped_by_a_hook, change, ranks=2)
    assert any("forward hook that computes with tensors is to be put on before parallelize" in e for e in errors), (
        errors
    )


def looked_at() -> list[tuple[str, bool]]:
    job = mw.parallelize(lambda: Model().double(), PLANS[0], batch=rows(0))
    job.step(rows(0))
    seen: list[tuple[str, bool]] = []
    for name in ("blocks.0", "blocks.3"):
        module = job.module.get_submodule(name)
        module.register_forward_hook(
            lambda m, given, out, name=name: seen.append((name, isinstance(out, mw.RemoteTensor)))
        )
    job.step(rows(1))
    return seen


def test_a_forward_hook_that_looks_may_come_late_and_is_not_called_by_planning(workers: LocalWorkers) -> None:
    first, last = workers.run(looked_at, ranks=2)
    assert ("blocks.0", False) in first and ("blocks.3", False) in last
    assert ("blocks.0", False) not in last and ("blocks.3", False) not in first


def hooked_on_one_rank(plan: dict[str, Any], parameter: bool) -> str:
    job = mw.parallelize(lambda: Model().double(), plan, batch=rows(0), timeout=20)
    ranks, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
    job.step(rows(0).chunk(ranks)[index])
    if job.rank == 1:
        name = "blocks.3.up"
        module = job.module.get_submodule(name)
        if parameter:
            module.weight.register_hook(clamped)  # type: ignore[union-attr, operator]
        else:
            job.module.get_submodule("blocks.3").register_full_backward_hook(halved)
    with pytest.raises(mw.PlanError) as error:
        job.step(rows(1).chunk(ranks)[index])
    return str(error.value)


@pytest.mark.parametrize(("plan", "parameter"), [({"mesh": "dp_shard=2"}, True), (PLANS[0], False)], ids=str)
def test_hooks_on_some_ranks_alone_are_an_error_on_every_rank(
    plan: dict[str, Any], parameter: bool, workers: LocalWorkers
) -> None:
    for error in workers.run(hooked_on_one_rank, plan, parameter, ranks=2):
        assert "blocks.3" in error and "not on rank 0" in error and "on every rank" in error


def test_what_forwards_set_is_no_switch() -> None:
    model = Model()
    switches = Switches(model)
    model.gain = 0.5  # by a forward
    switches.note()
    switches.look()
    assert switches.told is None
    model.gain, model.config.centred = 0.5, True
    switches.look()
    told = switches.told
    assert {(s.module, s.holder, s.key) for s in switches.now} == {("", "config", "centred")}
    switches.note()
    switches.look()
    assert switches.told == told


def test_a_number_that_is_set_before_every_step_is_told_by_its_sign_in_the_end() -> None:
    model = Model()
    switches, paths = Switches(model), set()
    for i in range(100):
        model.gain = 1 + i / 7
        switches.look()
        paths.add(switches.path)
    assert len(paths) < 12
    model.gain = -1.0
    switches.look()
    assert switches.path not in paths


def test_an_object_that_stands_under_another_name_is_seen() -> None:
    model = Model()
    model.config.kept = kept = object()
    switches = Switches(model)
    del model.config.kept
    model.config.other = kept
    switches.look()
    assert {s.key for s in switches.now} == {"kept", "other"}
