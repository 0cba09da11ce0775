"""Values that reach a block otherwise than by its arguments: from attributes, closures and hooks that a forward sets, over stages,
branches and microbatches. Whether the block runs again in the backward (a checkpoint) or not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw

WIDTH, ROWS = 8, 8
BRANCHES = {"mesh": "tp=2", "modules": {"left": {"on": "tp[0]"}, "right": {"on": "tp[1]"}}}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: list[Tensor]) -> Tensor:
        ctx.save_for_backward(scales[0])
        return x * scales[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


# How a block uses a value ``c`` that is not among its arguments.
WAYS: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "attribute": lambda block, h, c: block.linear(h) * c,
    "attribute of a container": lambda block, h, c: block.linear(h) * c["c"],
    "vmap": lambda block, h, c: torch.vmap(lambda t: block.linear(t) * c[0])(h),
    "jvp": lambda block, h, c: torch.func.jvp(lambda t: block.linear(t) * c, (h,), (c,))[1],
    "grad": lambda block, h, c: torch.func.grad(lambda t: (block.linear(t) * c).square().sum())(h),
    "function": lambda block, h, c: Scale.apply(block.linear(h), [c]),
    "weight": lambda block, h, c: torch.func.functional_call(
        block.linear, {"weight": block.linear.weight * c.mean(), "bias": c[0, 0]}, (h,)
    ),
    "checkpoint": lambda block, h, c: checkpoint(lambda t: block.linear(t) * c, h, use_reentrant=False),
    "checkpointed block": lambda block, h, c: block.linear(h) * c,
    "argument, too": lambda block, h, c: block.linear(h) * c,
    "closure of the argument": lambda block, h, c: block.linear(h) * block.closure(),
    "hook": lambda block, h, c: block.linear(h),
    "pre-hook": lambda block, h, c: block.linear(h),
}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear, self.context = way, nn.Linear(WIDTH, WIDTH), None

    def forward(self, h: Tensor) -> Tensor:
        return WAYS[self.way](self, h, self.context)


class Towers(nn.Module):
    """Two blocks of one value, beside each other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed, self.p = way, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.left, self.right = Block(way), Block(way)

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = self.embed(x)
        c, blocks, handles = h.tanh() * self.p, (self.left, self.right), []
        for block in blocks:
            block.context = {"c": c} if "container" in self.way else h if "too" in self.way else c
            block.closure = lambda: h
            if self.way == "hook":
                handles.append(block.register_forward_hook(lambda module, args, output: output * c))
            if self.way == "pre-hook":
                handles.append(block.register_forward_pre_hook(lambda module, args: (args[0] + c,)))
        again = self.way == "checkpointed block"
        y = sum(checkpoint(block, h, use_reentrant=False) if again else block(h) for block in blocks)
        for handle in handles:
            handle.remove()
        if not again:
            for block in blocks:
                block.context = block.closure = None
        return SimpleNamespace(loss=y.square().mean())


class Serial(nn.Module):
    """Four blocks one after the other. ``kept``: what of the batch they find in an attribute."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed, self.memo = way, nn.Linear(WIDTH, WIDTH), None
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def block(self, linear: nn.Module, h: Tensor) -> Tensor:
        if "memo" in self.way and self.memo is None:  # the first block that needs it makes it, for this forward
            self.memo = h.tanh()
        return (linear(h) * self.memo).tanh()

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = self.embed(x)
        if "mask" in self.way:
            self.memo = (x > 0).to(h.dtype)
        for linear in self.blocks:
            h = checkpoint(self.block, linear, h, use_reentrant=False) if "again" in self.way else self.block(linear, h)
        if "again" not in self.way:
            self.memo = None
        return SimpleNamespace(loss=h.square().mean())


def trained(model: type[nn.Module], ways: list[str], plan: dict[str, Any]) -> dict[str, list[float]]:
    """Way → losses and norms of gradients in two steps, with an evaluation after each."""
    results = {}
    for way in ways:
        torch.manual_seed(0)
        job = mw.parallelize(lambda way=way: model(way), plan, batch=torch.randn(ROWS, 4, WIDTH), dtype=torch.float64)
        optimizer, numbers = torch.optim.SGD(job.parameters(), lr=0.1), []
        for step in range(2):
            x = torch.randn(ROWS, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            own = x.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
            optimizer.zero_grad()
            numbers += [job.step(own.clone()).item(), float(job.grad_norm()), job.evaluate(own.clone()).item()]
            optimizer.step()
        results[way] = numbers
    return results


def compare(workers: Any, model: type[nn.Module], ways: list[str], plan: dict[str, Any]) -> None:
    expected = workers.run(trained, model, ways, {"mesh": "dp_shard=1"}, ranks=1)[0]
    found = workers.run(trained, model, ways, plan, ranks=2)[0]
    for way in ways:
        assert found[way] == pytest.approx(expected[way], rel=1e-9), way


ONE_BRANCH = {"mesh": "tp=2", "modules": {"blocks.0": {"on": "tp[1]"}}}

PIPELINES: list[Any] = [
    {"mesh": "pp=2", "microbatches": 2},
    pytest.param({"mesh": "pp=2"}, marks=pytest.mark.proof),
    pytest.param({"mesh": "pp=2", "microbatches": 4, "schedule": "interleaved"}, marks=pytest.mark.proof),
    pytest.param({"mesh": "pp=2", "microbatches": 4, "schedule": "zero_bubble"}, marks=pytest.mark.proof),
]


def test_over_branches_a_block_takes_the_tensors_of_its_branch(workers):
    compare(workers, Towers, list(WAYS), BRANCHES)


@pytest.mark.parametrize(
    "ways",
    [
        ["attribute", "checkpointed block", "hook"],
        pytest.param(["vmap", "pre-hook"], marks=pytest.mark.proof),
    ],
    ids=", ".join,
)
def test_over_stages(ways, workers):
    compare(workers, Towers, ways, {"mesh": "pp=2", "microbatches": 2})


@pytest.mark.proof
@pytest.mark.parametrize("plan", PIPELINES, ids=str)
def test_over_stages_in_every_way(plan, workers):
    compare(workers, Towers, list(WAYS), plan)


@pytest.mark.parametrize("plan", [*PIPELINES, {"mesh": "dp_shard=2", "microbatches": 2}], ids=str)
def test_what_a_forward_keeps_for_itself_alone(plan, workers):
    """A stage stops before the model resets it; and a checkpoint that runs again in a backward finds that of its own
    microbatch."""
    compare(workers, Serial, ["mask", "memo", "mask again"], plan)


class Applied(torch.autograd.Function):
    """Calls a function of the batch. That function uses more than its arguments; ``taken`` are some of what it uses."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *taken: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *(g * x for x in ctx.saved_tensors[: len(ctx.needs_input_grad) - 2])


class OfTheBatch(nn.Module):
    """A Function whose arguments follow from the batch alone, and which uses a parameter, a value or a module of some stage."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed = way, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = self.embed(x)
        functions = {
            "parameter": lambda t: nn.functional.linear(t, self.embed.weight),
            "parameter of a later stage": lambda t: nn.functional.linear(t, self.blocks[3].weight),
            "value": lambda t: t * h,
            "value that is an argument in training": lambda t: t * h,
            "module": self.blocks[0],
            "module of a later stage": self.blocks[3],
        }
        y = Applied.apply(functions[self.way], x, *([h] if "training" in self.way and h.requires_grad else []))
        for block in self.blocks:
            h = block(h).tanh()
        return SimpleNamespace(loss=(h * y).square().mean() + y.square().mean())


@pytest.mark.parametrize("plan", [*PIPELINES, {"mesh": "dp_shard=2"}, {"mesh": "tp=2"}, ONE_BRANCH], ids=str)
def test_a_function_of_the_batch_uses_what_is_not_among_its_arguments(plan, workers):
    ways = ["parameter", "value", "value that is an argument in training", "module"]
    compare(workers, OfTheBatch, [*ways, "parameter of a later stage", "module of a later stage"], plan)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None


class NoiseOfTheBatch(nn.Module):
    """Noise of a Function, and what blocks make of it, which is the noise again. ``way``: what the noise is drawn by."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.drop = way, nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for block in self.blocks:
            nn.init.eye_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = self.drop(self.blocks[0](x)) * 0
        if self.way == "function":
            noise = Noise.apply(x)
        else:
            noise = torch.vmap(lambda row: torch.rand_like(row), randomness="different")(x)
        h = h + noise
        for block in self.blocks:
            h = block(h)
        return SimpleNamespace(loss=(h - noise).abs().max() + (noise.max() < 0.9))


@pytest.mark.parametrize("way", ["function", "vmap"])
@pytest.mark.parametrize("plan", PIPELINES, ids=str)
def test_stages_see_one_noise_of_the_batch(way, plan, workers):
    steps = workers.run(trained_once, way, plan, ranks=2)
    assert steps == [0.0, 0.0]


def trained_once(way: str, plan: dict[str, Any]) -> float:
    """The loss of a second step, when stages have drawn other numbers of dropout."""
    x = torch.ones(ROWS, 4, WIDTH, dtype=torch.float64)
    job = mw.parallelize(lambda: NoiseOfTheBatch(way), plan, batch=x, dtype=torch.float64)
    job.step(x)
    return job.step(x).item()


class Penalty(nn.Module):
    """Asks for a gradient of what branches give, with respect to what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = self.embed(x)
        y = self.left(h).tanh() + self.right(h.sin())
        (g,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
        return SimpleNamespace(loss=y.square().mean() + g.square().mean())


def test_a_gradient_that_would_flow_through_branches_is_refused():
    with pytest.raises(
        mw.PlanError, match=r"a gradient that the forward asks for itself .* flows out of this branch or into it"
    ):
        mw.make_recipe(Penalty, BRANCHES, batch=torch.randn(ROWS, 4, WIDTH))
