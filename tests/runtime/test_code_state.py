"""What a model's code keeps outside of its modules is, in each step, what it is on one device: planning and trials put it back."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.code_state import CodeState, code_state_kept
from meshwright.generators import seed_all
from meshwright.workers.pool import LocalWorkers

# Run anew for each model, so that each begins with the same state.
SOURCE = """
import functools
import torch
from torch import nn

STEPS, LOG, TABLE, MADE, TENSOR = 0, [], {}, [], torch.zeros(())

class Counter:
    steps = 0
    def __init__(self):
        self.own = 0

COUNTER = Counter()

def closed():
    steps = 0
    def count():
        nonlocal steps
        steps += 1
        return steps
    return count

CLOSED = closed()

def with_default(calls=[]):
    calls.append(1)
    return len(calls)

def with_attribute():
    with_attribute.calls = getattr(with_attribute, "calls", 0) + 1
    return with_attribute.calls

@functools.lru_cache(maxsize=4)
def cached(size):
    return [0]

def mask(x):
    if "mask" not in TABLE:
        TABLE["mask"] = x.new_full((WIDTH,), 2.0)
    return TABLE["mask"]

def another(kind):
    global STEPS
    if kind == "a global":
        STEPS += 1
        return STEPS
    if kind == "a list":
        LOG.append(1)
        return len(LOG)
    if kind == "a dict":
        TABLE["steps"] = TABLE.get("steps", 0) + 1
        return TABLE["steps"]
    if kind == "an attribute of a class":
        Counter.steps += 1
        return Counter.steps
    if kind == "an attribute of an object":
        COUNTER.own += 1
        return COUNTER.own
    if kind == "a closure":
        return CLOSED()
    if kind == "a default":
        return with_default()
    if kind == "an attribute of a function":
        return with_attribute()
    if kind == "a cached result":
        cached(3)[0] += 1
        return cached(3)[0]
    if kind == "a tensor":
        TENSOR.add_(1)
        return TENSOR.clone()
    return 1

WIDTH = 8

class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.index = kind, len(MADE)
        MADE.append(self)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        x = x + self.down(self.up(x).relu())
        if self.kind == "a cache of tensors":
            return x * mask(x)
        return x * (1 + self.index) if self.kind == "what is made" else x

class Model(nn.Module):
    calls = 0

    def __init__(self, kind):
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Block(kind) for _ in range(4))

    def forward(self, x):
        n = another(self.kind)
        if self.kind == "an attribute of its class":
            type(self).calls += 1
            n = self.calls
        for block in self.blocks:
            x = block(x * (1 + 0.1 * n))
        return x.square().mean()
"""

KINDS = (
    "a global", "a list", "a dict", "an attribute of a class", "an attribute of an object", "an attribute of its class",
    "a closure", "a default", "an attribute of a function", "a cached result", "a tensor", "what is made",
    "a cache of tensors",
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "dp_shard": {"mesh": {"dp_shard": 2}},
    "pp": {"mesh": {"pp": 2}, "microbatches": 1},
}


def fresh(kind: str) -> nn.Module:
    space: dict[str, Any] = {"__name__": "a_model"}
    exec(compile(SOURCE, "a_model.py", "exec"), space)
    model: nn.Module = space["Model"](kind).double()
    return model


def builder(kind: str) -> Any:
    """A function that makes the model from code that was run once."""
    space: dict[str, Any] = {"__name__": "a_model", "KIND": kind}
    exec(compile(SOURCE + "\ndef build():\n    return Model(KIND).double()\n", "a_model.py", "exec"), space)
    return space["build"]


def rows(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 8, dtype=torch.float64).reshape(4, 8).roll(step, 0)


def trained(kind: str, plan: dict[str, Any] | None) -> list[float]:
    """Runs on every rank: the losses of three steps, on one device if there is no plan."""
    build = builder(kind)
    if plan is None:
        seed_all(mw.Plan(mesh="tp=1").seed)
        model = build()
        step, parameters = lambda x: model(x), list(model.parameters())
    else:
        job = mw.parallelize(build, plan, batch={"x": rows(0)})
        mine = slice(None) if "dp_shard" not in plan["mesh"] else slice(2 * job.rank, 2 * job.rank + 2)
        step, parameters = lambda x: job.step({"x": x[mine]}), list(job.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-4)
    losses = []
    for number in range(3):
        loss = step(rows(number))
        if plan is None:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


CASES = [
    (layout, kind) for layout in LAYOUTS for kind in KINDS if (layout, kind) != ("pp", "a cache of tensors")
]  # docs/limits.md
QUICK = {("tp", "a global"), ("tp", "a cached result"), ("pp", "what is made"), ("dp_shard", "a cache of tensors")}


@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.proof) for c in CASES]
)
def test_steps_begin_with_the_state_of_one_device(layout: str, kind: str, workers: LocalWorkers) -> None:
    expected = workers.run(trained, kind, None, ranks=1)[0]
    for losses in workers.run(trained, kind, LAYOUTS[layout], ranks=2):
        assert losses == pytest.approx(expected, rel=1e-10)
    assert len(set(expected)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_changes_is_put_back(kind: str) -> None:
    model = fresh(kind)
    x = rows(0)
    with code_state_kept(model):
        first = model(x).item()
        model(x)
    assert model(x).item() == first
    state = CodeState(model)
    after = model(x).item()
    state.put_back()
    assert model(x).item() == after


def test_a_function_that_makes_a_model_is_followed_to_its_classes() -> None:
    build = builder("what is made")
    with code_state_kept(build):
        before = [block.index for block in build().blocks]
    assert before == [block.index for block in build().blocks] == [0, 1, 2, 3]


@functools.cache
def drawn_once(size: int) -> list[Tensor]:
    """A table that the first model draws, and later ones find."""
    return [torch.randn(size, size)]


class FromATable(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", drawn_once(size)[0].clone())
        self.first, self.last = nn.Linear(size, size), nn.Linear(size, size)  # drawn after the table, or without one

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() @ self.table).square().mean()


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp_shard=2"])
def test_a_constructor_s_cache_is_empty_for_each_model(mesh: str, workers: LocalWorkers) -> None:
    """Also if a partial function that makes the model is within an object that prepares it, as ``check`` has one."""
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
    report = mw.check(partial(FromATable, 8), batch, mesh, loss=output, workers=workers, dtype=torch.float64)
    assert report and not any("does not repeat itself" in note for note in report.notes), report


def output(loss: Tensor) -> Tensor:
    return loss


ONCE = """
import torch
from torch import nn

LIBRARY, TYPE, LAST = None, None, None

class Model(nn.Module):
    compiled = None

    def forward(self, x):
        global LIBRARY, TYPE, LAST
        if LIBRARY is None:
            LIBRARY = torch.library.Library("of_a_test", "DEF")
            type(self).compiled = staticmethod(torch.nn.functional.gelu)
        TYPE, LAST = x.dtype, [x]
        return self.compiled(x)
"""


def test_what_is_made_once_for_the_process_stays() -> None:
    space: dict[str, Any] = {"__name__": "a_model"}
    exec(compile(ONCE, "a_model.py", "exec"), space)
    model = space["Model"]()
    with code_state_kept(model):
        model(rows(0))
    assert isinstance(space["LIBRARY"], torch.library.Library) and type(model).compiled is not None
    assert space["TYPE"] is space["LAST"] is None
    model(rows(0))  # a library cannot be made twice
