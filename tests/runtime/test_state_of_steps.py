"""A step leaves on modules what one forward of all its rows leaves on one device, into however many microbatches it is
divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.generators import seed_all
from meshwright.workers.pool import LocalWorkers


class Counting(nn.Module):
    """State that follows from nothing of the batch, which the forward reads: buffers written in place and assigned, a Python
    number, a list, a parameter that is the average of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 1)
        self.register_buffer("seen", torch.ones(6))
        self.register_buffer("assigned", torch.tensor(0.5))
        self.register_buffer("steps", torch.tensor(0))
        self.late = nn.ModuleList([nn.Identity()])
        self.late.register_buffer("seen", torch.ones(1))
        self.number, self.history = 0, [1.0]
        self.average = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * self.steps)
        self.steps += 1
        self.number += 1
        self.history.append(self.history[-1] * 0.5)
        h = torch.tanh(self.first(x)) * self.seen + self.number + self.history[-1]
        with torch.no_grad():
            self.average.mul_(0.5).add_(self.first.bias, alpha=0.5)
        h = h + self.average
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        self.assigned = self.assigned * 0.5 + 1
        self.late.seen.mul_(0.9).add_(0.2)
        return (self.last(h) * self.late.seen + self.assigned).square().mean()


class Hooked(nn.Module):
    """Registers hooks in its first forward, which collect what its blocks give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last, self.is_hooked = nn.Linear(6, 1), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            for block in self.blocks:
                block.register_forward_hook(lambda module, args, given: self.given.append(given))
            self.is_hooked = True
        self.given: list[Tensor] = []
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        given, self.given = self.given, []
        return (self.last(h).square() + sum((i + 1) * t.sum(1) for i, t in enumerate(given))[:, None]).mean()


class Statistics(nn.Module):
    """State that follows from rows, and a count of forwards beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1)
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


class Made(nn.Module):
    """State that its first forward makes: the mean of what block 2 gave, which the next forward adds to the batch, or to what
    block 0 gives."""

    def __init__(self, way: str, *, to_batch: bool = False) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.way, self.to_batch = way, to_batch

    def forward(self, x: Tensor) -> Tensor:
        zeros, x = torch.zeros(6, dtype=x.dtype), x.repeat(1, 2)[:, :6]
        h = torch.tanh(self.first(x + self.earlier(zeros) if self.to_batch else x))
        for i, block in enumerate(self.blocks):
            h = torch.tanh(block(h))
            if i == 0 and not self.to_batch:
                h = h + self.earlier(zeros)
            if i == 2:
                self.last = h.detach().mean(0)
        return h.square().mean()

    def earlier(self, zeros: Tensor) -> Tensor:
        if self.way == "getattr":
            return getattr(self, "last", zeros)
        if self.way == "hasattr":
            return self.last if hasattr(self, "last") else zeros
        if self.way == "vars":
            return vars(self).get("last", zeros)
        if not hasattr(self, "last"):
            self.register_buffer("last", zeros, persistent=False)
        return self.last


class Codebook(nn.Module):
    """A table that its forward writes last of all, once everything that others take of it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), *(nn.Linear(6, 6) for _ in range(3)))
        self.last, self.table = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Embedding(2, 6)
        self.table.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.table((h.sum(-1) > 0).long())
        with torch.no_grad():
            self.table.weight.data.copy_(0.5 * self.table.weight + h.mean(0))
        for block in self.last:
            h = torch.tanh(block(h))
        return h.square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


Found = tuple[list[float], dict[str, Tensor | None], Any]


def after_three_steps(cases: list[tuple[Callable[[], nn.Module], Any]]) -> list[Found]:
    found: list[Found] = []
    for build, plan in cases:
        job = mw.parallelize(build, plan, batch=rows(0), dtype=torch.float64)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        mesh, losses = job.recipe.mesh, []
        for step in range(3):
            losses.append(job.step(rows(step).chunk(mesh.data_size)[mesh.data_index(job.rank)]).item())
            optimizer.step()
            optimizer.zero_grad()
        values = {line.name: value for line, value in job.full_parameters()} | dict(job.full_buffers())
        found.append((losses, values, [getattr(job.module, name, None) for name in ("number", "history")]))
    return found


def one_device(build: Callable[[], nn.Module]) -> Found:
    seed_all(0)
    model = build().double()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        loss = model(rows(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, values, [getattr(model, name, None) for name in ("number", "history")]


PLANS: list[dict[str, Any]] = [
    {"mesh": "pp=2", "microbatches": 3},
    {"mesh": "pp=2", "microbatches": 4, "schedule": "interleaved"},
    {"mesh": "dp_shard=2", "microbatches": 3},
    {"mesh": "tp=2", "microbatches": 3, "recompute": "blocks"},
]


@pytest.mark.parametrize(
    ("build", "plans"),
    [
        (Counting, PLANS[:1]),
        (Hooked, PLANS[2:]),
        (Statistics, PLANS),
        pytest.param(Counting, PLANS[1:], marks=pytest.mark.proof),
    ],
)
def test_state_is_that_of_one_forward_a_step(
    workers: LocalWorkers, build: Callable[[], nn.Module], plans: list[dict[str, Any]]
) -> None:
    for plan, (losses, values, numbers) in zip(
        plans, workers.run(after_three_steps, [(build, plan) for plan in plans], ranks=2)[0], strict=True
    ):
        expected = one_device(build)
        assert losses == pytest.approx(expected[0], rel=1e-10), plan
        assert values.keys() == expected[1].keys()
        for name, value in expected[1].items():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-10, atol=1e-12, msg=f"{name} {plan}")
        assert numbers == expected[2], plan


def test_a_stage_ends_after_its_last_write_to_a_parameter(workers: LocalWorkers) -> None:
    losses, values, _ = workers.run(after_three_steps, [(Codebook, {"mesh": "pp=2", "microbatches": 1})], ranks=2)[0][0]
    expected, table, _ = one_device(Codebook)
    assert losses == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(values["table.weight"], table["table.weight"].detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["getattr", "hasattr", "vars", "register_buffer"])
def test_state_that_a_forward_makes_is_in_one_stage(workers: LocalWorkers, way: str) -> None:
    build = partial(Made, way)
    losses, *_ = workers.run(after_three_steps, [(build, {"mesh": "pp=2", "microbatches": 1})], ranks=2)[0][0]
    assert losses == pytest.approx(one_device(build)[0], rel=1e-10)
    assert any(
        {"blocks.1", "blocks.2"} <= set(stage.modules)
        for stage in mw.make_recipe(build, "pp=2", rows(0).float()).stages
    )


@pytest.mark.parametrize("way", ["getattr", "hasattr", "vars", "register_buffer"])
def test_state_that_a_forward_makes_and_that_changes_what_follows_from_the_batch_is_an_error(way: str) -> None:
    with pytest.raises(mw.PlanError, match="another way than the one before it, for what that left in last"):
        mw.make_recipe(partial(Made, way, to_batch=True), "pp=2", rows(0).float())


class Adds:
    def __init__(self, mean):
        self.mean = mean

    def __call__(self, y):
        return y + self.mean


class Holder:
    def __init__(self, back):
        self.back = back


class Centre(nn.Module):
    """Gives its input without its mean, and a function that puts the mean back."""

    def __init__(self, how):
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(8))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        back = {
            "closure": lambda y: y + mean,
            "partial": partial(torch.add, mean),
            "method": mean.add,
            "default": lambda y, mean=mean: y + mean,
            "object": Holder(Adds(mean)),
        }[self.how]
        return (x - mean) * self.scale, {"back": back}


class Centred(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.centre, self.layers = Centre(how), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        y, more = self.centre(x)
        for layer in self.layers:
            y = layer(y).tanh()
        back = more["back"].back if self.centre.how == "object" else more["back"]
        return back(y).square().mean()


def losses_of_three_batches(how, plan):
    """Of three batches that differ, each seen once; ``plan``: None is one device."""
    batches = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    seed_all(0)
    if plan is None:
        model = Centred(how).double()
        return [model(x).item() for x in batches]
    job = mw.parallelize(partial(Centred, how), plan, batch=(batches[0],), loss=lambda loss: loss, dtype=torch.float64)
    return [job.step((x,)).item() for x in batches]


@pytest.mark.parametrize("how", ["closure", "partial", "method", "default", "object"])
def test_a_function_that_a_module_returns_keeps_what_follows_from_this_batch(how, workers):
    found = workers.run(losses_of_three_batches, how, {"mesh": "pp=2"}, ranks=2)
    for losses in found:
        assert losses == pytest.approx(losses_of_three_batches(how, None), rel=1e-9)


class Angles(nn.Module):
    """A table of angles, made by the first of the calls that need so many, and taken by those that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.tensor([1.0, 0.5, 0.25, 0.125]), requires_grad=False)
        self.register_buffer("table", torch.zeros(16, 4), persistent=False)
        self.length = 0

    def forward(self, length: int) -> Tensor:
        if length <= self.length:
            return self.table[:length].detach()
        angles = torch.arange(length)[:, None] * self.frequencies
        self.table[:length] = angles.detach()
        self.length = length
        return angles


class Turns(nn.Module):
    """Asks for its angles twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.angles = nn.Linear(4, 8), Angles()

    def forward(self, x: Tensor) -> Tensor:
        query, key = (y * self.angles(x.shape[1]).cos() for y in self.linear(x).chunk(2, -1))
        return x + torch.tanh(query + key * self.angles(x.shape[1]).sin())


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turns() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def losses_of_lengths(plan: Any) -> list[float]:
    """``plan``: None is one device."""
    batches = [torch.randn(4, n, 4, generator=torch.Generator().manual_seed(n)).double() for n in (3, 3, 2, 5, 5, 4)]
    seed_all(0)
    if plan is None:
        model: Any = Turning().double()
        parameters = [p for p in model.parameters() if p.requires_grad]
    else:
        model = mw.parallelize(Turning, plan, batch=(batches[0],), loss=lambda loss: loss, dtype=torch.float64)
        parameters = list(model.parameters())
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for x in batches:
        if plan is None:
            loss = model(x)
            loss.backward()
        else:
            loss = model.step((x,))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_table_that_a_module_keeps_is_of_the_stage_of_the_block_that_asks_twice(workers: LocalWorkers) -> None:
    """The first forward makes the table in one call and takes it in the next; the forward that follows takes it in both."""
    for found in workers.run(losses_of_lengths, {"mesh": "pp=2", "microbatches": 2}, ranks=2):
        assert found == pytest.approx(losses_of_lengths(None), rel=1e-10)
