"""Models that read a value and act on it, over branches and stages: what they compute afterwards takes another path than the
recorded one, which took every condition as false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.runtime.coupling.float64 import in_float64

WIDTH, ROWS = 4, 4
BRANCHES = {"mesh": "tp=2", "modules": {"pair.left": {"on": "tp[0]"}, "pair.right": {"on": "tp[1]"}}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h).tanh()


class Pair(nn.Module):
    """Returns other combinations of its branches, as a value says."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor, gate: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        a, b = self.left(x) * 3, self.right(x)
        rest = b.view(-1)[WIDTH:]
        if (gate.sum() * sign > 0).item():
            return (a + gate).mean(), rest
        return (b * gate).mean() + a.sum(), rest * 2


class Gate(nn.Module):
    """Returns its argument and what it made of it, in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return (x, y) if (x.square().sum() * sign > 0).item() else (y, x)


def between(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A read of the trunk while a branch has other work."""
    y, c, v = model.head(a + b).square().mean(), b.square().sum() * 0.05, model.stem(a).square().mean()
    return c + v / v.item() + y


def logged(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    loss = a.square().mean()
    loss.item()
    return loss + model.head(b).square().mean()


def one_or_other(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    c = a * 2
    return c.mean() if (model.stem(x).exp().sum() > 0).item() else b.mean()


def written(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    c = a * 2
    c[0].mul_(3.0)
    if (model.stem(x).exp().sum() > 0).item():
        c.mul_(2.0)
    return c.mean() + b.mean()


def clipped(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(a)
    if norm.item() > 0:
        a = a / norm
    return (a * b).sum()


def until_small(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for _ in range(10):
        b = model.head(b).relu() + a * 0.1
        if b.norm().item() < 3:
            break
    return b.square().mean()


def picked(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    some = b[x[..., 0] > 0]
    return some.mean() if (model.stem(x).exp().sum() < 0).item() else a.mean()


def picked_before(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rest takes a value whose size follows from the batch; no variable holds another value of the branches."""
    y, some = model.head(a + b).square().mean(), b[x[..., 0] > 0]
    del a, b
    loss = model.stem(x).square().mean()
    loss.item()
    return loss + some.square().mean() + y


def in_pair(model: Any, x: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
    loss, rest = model.pair(x, model.stem(x).exp(), sign)
    return loss + rest.square().sum() * 0.1


def in_pair_else(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return in_pair(model, x, a, b, -1)


def handed_on(model: Any, x: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
    h, rest = model.gate(model.stem(x) + 3, sign)
    return (model.head(model.last(h).tanh()) + rest).square().mean()


def handed_on_else(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return handed_on(model, x, a, b, -1)


def kept_from_before(model: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """On the path that is taken, a later stage takes a value of an earlier one."""
    early = model.stem(x)
    late = model.head(model.last(model.gate.linear(early)))
    return (late * early).mean() if (late.square().sum() > 0).item() else late.mean()


WAYS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (between, logged, one_or_other, written, clipped, until_small, picked, picked_before)
}
INNER = {f.__name__: f for f in (in_pair, in_pair_else)}
SERIAL = {f.__name__: f for f in (handed_on, handed_on_else, kept_from_before)}


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.stem, self.pair, self.gate = way, nn.Linear(WIDTH, WIDTH), Pair(), Gate()
        self.head, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.way in WAYS:
            return {"loss": WAYS[self.way](self, x, self.pair.left(x), self.pair.right(x))}
        return {"loss": {**INNER, **SERIAL}[self.way](self, x, x, x)}


def trained(ways: list[str], plan: dict[str, Any]) -> dict[str, list[float]]:
    results = {}
    for way in ways:
        torch.manual_seed(0)
        batch = torch.randn(ROWS, 3, WIDTH, dtype=torch.float64)
        job = mw.parallelize(lambda way=way: Model(way), plan, batch=batch, dtype=torch.float64)
        optimizer, numbers = torch.optim.SGD(job.parameters(), 0.1), []
        for step in range(3):
            x = torch.randn(ROWS, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            numbers += [job.step(x).item(), float(job.grad_norm())]
            optimizer.step()
        results[way] = numbers
    return results


def compare(workers: Any, ways: dict[str, Any], plan: dict[str, Any]) -> None:
    expected = workers.run(trained, [*ways], {"mesh": "dp_shard=1"}, ranks=1)[0]
    found = workers.run(trained, [*ways], plan, ranks=2)[0]
    for way in ways:
        assert found[way] == pytest.approx(expected[way], rel=1e-9), way


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_over_branches(microbatches, workers):
    compare(workers, {**WAYS, **INNER}, {**BRANCHES, "microbatches": microbatches})


@pytest.mark.parametrize("microbatches", [2, pytest.param(1, marks=pytest.mark.proof)])
def test_over_stages(microbatches, workers):
    compare(workers, SERIAL, {"mesh": "pp=2", "microbatches": microbatches})


def gradients(x: Tensor, given: Tensor, weight: Tensor) -> list[Tensor]:
    """Gradients that a forward asks for, in several ways."""
    leaf = x.clone().requires_grad_()
    function = lambda t: (t @ weight).tanh()  # noqa: E731
    return [
        torch.autograd.grad(function(leaf).sum(), leaf, allow_unused=True, create_graph=True)[0],
        torch.autograd.grad(function(leaf), [leaf], given)[0],
        torch.autograd.grad(function(leaf), [leaf], grad_outputs=given)[0],
        torch.func.grad(lambda t: function(t).square().sum())(x),
        torch.func.vjp(function, x)[1](given)[0],
        torch.func.jacrev(function)(x),
    ]


def test_gradients_within_a_forward_in_float64_are_those_of_the_model():
    """A gradient with respect to a copy in float64 is none, or zero."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 3) for _ in range(3)]
    expected = gradients(*tensors)
    with in_float64(perturbed=False):
        found = gradients(*tensors)
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-5)


class Scribbles(nn.Module):
    """Writes in place to the batch, and acts on a value: other ranks would not follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h[:, -1:].mul_(0.5)
        y = self.linear(h)
        return y * 2 if float(y.square().mean()) >= 0 else y


class Scribbled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Scribbles(), Block()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.left(x) + self.right(x)).square().mean()}


def test_a_branch_that_acts_and_writes_to_the_batch_is_refused():
    plan = {"mesh": "tp=2", "modules": {"left": {"on": "tp[0]"}, "right": {"on": "tp[1]"}}}
    with pytest.raises(mw.PlanError, match=r"in a call that other ranks follow too"):
        mw.make_recipe(Scribbled, plan, batch=torch.randn(ROWS, 3, WIDTH))
