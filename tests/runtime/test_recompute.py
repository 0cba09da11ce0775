"""Recompute leaves a model as it would be without: what a forward changes is changed once, and read as the first time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.calls.hook import ModuleCalls
from meshwright.generators import Generators, seed_all
from meshwright.runtime.weights.recompute import recomputed
from meshwright.workers.pool import LocalWorkers


class Block(nn.Module):
    """Reads, and then changes, all kinds of state; and writes to its input."""

    def __init__(self, does: tuple[str, ...]) -> None:
        super().__init__()
        self.does = does
        self.up, self.down, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.BatchNorm1d(6)
        self.register_buffer("code", torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.calls, self.history, self.recent = 0, [], [torch.zeros(6)]
        self.notes = SimpleNamespace(scale=1.0, table={"last": None})

    def forward(self, x: Tensor) -> Tensor:
        if "write to its input" in self.does:
            x.mul_(1.1)
        scale = random.random() if "draw" in self.does else self.notes.scale
        out = self.norm(x + scale * self.down(torch.tanh(self.up(x) * (1 + self.calls))) + self.code + self.recent[0])
        with torch.no_grad():
            self.code.data.lerp_(out.mean(0), 0.3)
            if "assign" in self.does:
                self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
            self.recent[0] = self.recent[0] + self.mean
            self.seen += 1
        self.calls += 1
        self.history.append(self.calls)
        self.notes.scale *= 0.5
        self.notes.table["last"] = out.detach()
        return out


class Model(nn.Module):
    def __init__(self, *does: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(does) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + x
        return self.head(x).pow(2).mean()


def rows() -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def attributes(model: nn.Module) -> list[Any]:
    return [
        (b.calls, list(b.history), b.notes.scale, *map(torch.Tensor.tolist, (*b.recent, b.notes.table["last"])))
        for b in model.blocks
    ]


def trained(build: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Three steps; gradients are those of the last."""
    job = mw.parallelize(build, plan, batch=rows(), dtype=torch.float64)
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    mine = rows().chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    seed_all(3)
    found: dict[str, Any] = {"losses": []}
    for _ in range(3):
        optimizer.zero_grad()
        found["losses"].append(job.step(mine).item())
        found["gradients"] = {line.name: g for line, g in job.full_gradients()}
        optimizer.step()
    found["state"] = {**job.full_state_dict(), **{n: b for n, b in job.full_buffers() if b is not None}}
    if job.pipeline is None:
        found["attributes"] = attributes(job.module)
    return found


def by_hand(build: Any) -> dict[str, Any]:
    seed_all(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_all(3)
    found: dict[str, Any] = {"losses": []}
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(rows())
        loss.backward()
        found["losses"].append(loss.item())
        found["gradients"] = {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
    found["state"] = {**model.state_dict(), **dict(model.named_buffers())}
    found["attributes"] = attributes(model)
    return found


LAYOUTS = {
    "tp": (partial(Model, "assign", "draw", "write to its input"), {"mesh": {"tp": 2}, "recompute": "blocks"}),
    "sharded": (partial(Model, "assign"), {"mesh": {"dp_shard": 2}, "recompute": "blocks"}),
    "stages": (Model, {"mesh": {"pp": 2}, "recompute": "blocks"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_forward_changes_is_changed_once_and_read_as_the_first_time(layout: str, workers: LocalWorkers) -> None:
    build, plan = LAYOUTS[layout]
    found, expected = workers.run(trained, build, plan, ranks=2)[0], by_hand(build)
    for key in found:
        torch.testing.assert_close(
            found[key], expected[key], rtol=1e-9, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )


class Later(nn.Module):
    """Writes to its input from its second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.ones(6)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x.mul_(2) if self.calls > 1 else x + self.scale)


def test_an_input_that_is_written_later_only_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Later())
    ModuleCalls(model, recomputed=recomputed(model, ["1"], Generators(torch.device("cpu"))))
    x = rows().float()
    model(x).mean().backward()
    with pytest.raises(RuntimeError, match="1 cannot be made again: it writes to its input in this forward"):
        model(x)


class Differentiates(nn.Module):
    """Takes a gradient within its forward, by a function of torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda t: t.tanh().square().sum())(x)


def test_a_block_that_differentiates_by_torch_func_is_an_error_with_what_the_plan_should_say() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Differentiates())
    ModuleCalls(model, recomputed=recomputed(model, ["1"], Generators(torch.device("cpu"))))
    with pytest.raises(
        RuntimeError, match=r"by a function of torch.func. In the plan: modules: {1: {recompute: none}}"
    ):
        model(rows().float())


def test_an_input_that_is_written_after_the_forward_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    ModuleCalls(model, recomputed=recomputed(model, ["1"], Generators(torch.device("cpu"))))
    x = model[0](rows().float())
    out = model[1](x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="its input was written to after its forward"):
        out.mean().backward()


@dataclass
class Hidden:
    x: Tensor
    calls: int = 0
    seen: list[Tensor] = field(default_factory=list)


class OfHidden(nn.Module):
    """Is given an object, writes to it, and computes with what stands in it."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.sets, self.linear = sets, nn.Linear(6, 6)

    def forward(self, hidden: Hidden) -> Tensor | None:
        hidden.calls += 1
        hidden.seen.append(hidden.x)
        result = torch.tanh(self.linear(hidden.x) * hidden.calls) + sum(hidden.seen[:2])
        if not self.sets:
            return result
        hidden.x = result
        return None


class ThroughAnObject(nn.Module):
    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OfHidden(sets) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Hidden(x * 1.0)
        for block in self.blocks:
            result = block(hidden)
            hidden.x = hidden.x if result is None else result
        return hidden.x.square().mean() * hidden.calls


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2"])
@pytest.mark.parametrize("sets", [False, True], ids=["the model writes", "the block writes"])
def test_an_object_is_in_the_recompute_what_it_was_in_the_forward(sets: bool, mesh: str, workers: LocalWorkers) -> None:
    report = mw.check(
        partial(ThroughAnObject, sets),
        (rows(),),
        {"mesh": mesh, "recompute": "blocks"},
        loss=lambda x: x,
        workers=workers,
        dtype=torch.float64,
    )
    assert report.passed, str(report)


class Swapped(nn.Module):
    """Calls each block with other tensors in the place of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            scaled = {name: 1.5 * p for name, p in block.named_parameters()}
            x = x + torch.func.functional_call(block, scaled, (x,))
        return x.square().mean()


@pytest.mark.parametrize("plan", [{"mesh": "dp_shard=1"}, {"mesh": "dp_shard=2"}, {"mesh": "pp=2"}], ids=str)
def test_a_block_that_runs_with_other_tensors_as_parameters_keeps_its_activations(
    plan: Any, workers: LocalWorkers
) -> None:
    """They are gone when the backward would run it again. It ran with the block's own: loss right, gradients wrong."""
    report = mw.check(
        Swapped, (rows(),), {**plan, "recompute": "blocks"}, loss=lambda x: x, workers=workers, dtype=torch.float64
    )
    assert report.passed, str(report)
    recipe = mw.make_recipe(Swapped, {**plan, "recompute": "blocks"}, (rows(),), loss=lambda x: x)
    assert any(
        "keeps its activations: its forward runs with another tensor in the place of" in note for note in recipe.notes
    )


class Force(nn.Module):
    """The gradient of an energy by its input: what was dropped of the energy's forward is made again before the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            h = h if h.requires_grad else h.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(h).sum(), h, create_graph=True)
        return force


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Force() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h).square().mean()


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_shard=2,tp=2", "pp=2"])
def test_a_block_may_ask_for_a_gradient_within_its_forward(mesh: str, workers: LocalWorkers) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    report = mw.check(
        Forces, (x,), {"mesh": mesh, "recompute": "blocks"}, workers=workers, dtype=torch.float64, steps=2
    )
    assert report, report


class Cornered(nn.Module):
    """A checkpoint of the model's own that recomputes within the forward, and a corner in a number of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 6), Force(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + checkpoint(lambda h: self.block(h.float()), h, use_reentrant=False)
        h = self.last(h)
        return h.square().mean() + (h.mean(0).sum() - 100).relu()


def rows_of_job(mesh: str) -> str:
    job = mw.parallelize(Cornered, mesh, batch=(torch.randn(2, 6),), loss=lambda y: y)
    seed = job.recipe.mesh.data_index(job.rank)
    job.step((torch.randn(2, 6, generator=torch.Generator().manual_seed(seed)),))
    return job.rows


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2,tp=2"])
def test_a_trial_follows_a_forward_that_recomputes(mesh: str, workers: LocalWorkers) -> None:
    """What is recomputed runs under the trial's modes, to its end: else the trial failed, and nothing followed from it."""
    ranks = mw.Plan.parse(mesh).mesh.size
    assert set(workers.run(rows_of_job, mesh, ranks=ranks)) == {"coupled"}


def test_a_forward_that_recomputes_is_judged_in_float64(workers: LocalWorkers) -> None:
    """Also if it casts to float32 in what is recomputed."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    report = mw.check(Cornered, (x,), "dp_replicate=2", workers=workers, dtype=torch.float64, steps=2)
    assert report, report


class Adapts(nn.Module):
    """A backward within the forward, through a checkpoint, to what is added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        added = torch.zeros_like(x).requires_grad_()
        own = checkpoint(self.net, x.detach() + added, use_reentrant=False).square().mean(-1).sum()
        if torch.is_grad_enabled():
            own.backward(inputs=[added])
        more = 0.0 if added.grad is None else added.grad.detach()
        return self.net(x + more).square().mean()


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2"])
def test_a_backward_within_the_forward_may_recompute(mesh: str, workers: LocalWorkers) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    report = mw.check(Adapts, (x,), mesh, workers=workers, dtype=torch.float64, steps=2)
    assert report, report


class Scores(nn.Module):
    """One block, whose attention is checkpointed as code of its forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8), reentrant

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (self.q(x), k, v))
        total, values = checkpoint(self.weighed, q, k, v, use_reentrant=self.reentrant)
        return (x + self.out((values / total).transpose(1, 2).flatten(2))).square().mean()

    def weighed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = nn.functional.dropout((q @ k.transpose(-1, -2)).exp(), p=0.0)
        return weights.sum(-1, keepdim=True), weights @ v


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2", "dp_shard=2,tp=2"])
def test_a_stage_may_end_in_checkpointed_code(mesh: str, reentrant: bool, workers: LocalWorkers) -> None:
    """A reentrant checkpoint keeps local tensors, and its code gets new global ones: they are the same values."""
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    report = mw.check(partial(Scores, reentrant), (x,), mesh, workers=workers, dtype=torch.float64, steps=2)
    assert report, report
