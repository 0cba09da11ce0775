"""Units that hand on more than FSDP2 sees: it sees what a module is given, and what it returns."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.calls.structure import put_tensors


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def computed(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Aside(Block):
    """Keeps a loss of its own in an attribute, as routers do."""

    def forward(self, x):
        y = self.computed(x)
        self.aside = self.up(x).square().mean()
        return y


class Adds(Block):
    """Adds its result to a list, and returns nothing."""

    def forward(self, results):
        results.append(self.computed(results[-1]))


@dataclasses.dataclass
class State:
    x: torch.Tensor


class Sets(Block):
    """Sets an attribute of an object, and returns nothing."""

    def forward(self, state):
        state.x = self.computed(state.x)


class Later(Block):
    """Returns a function that holds what it computed."""

    def forward(self, x):
        y = self.computed(x)
        return lambda z: z + y


class Named(dict):
    """A container that torch's pytree does not know."""


class Names(Block):
    def forward(self, x):
        return Named(x=self.computed(x))


class Writes(Block):
    """Writes to a part of what it is given, and returns nothing."""

    def forward(self, x):
        x[:, :4] = self.computed(x * 1.0)[:, :4]


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        return self.through(x).square().mean() + sum(getattr(b, "aside", 0) for b in self.blocks)

    def through(self, x):
        first = self.blocks[0]
        if isinstance(first, Adds):
            results = [x]
            for block in self.blocks:
                block(results)
            return torch.stack(results).sum(0)
        if isinstance(first, (Sets, Writes)):
            state = State(x.clone())
            for block in self.blocks:
                block(state if isinstance(first, Sets) else state.x)
            return state.x
        for block in self.blocks:
            y = block(x)
            x = y(x) if isinstance(first, Later) else y["x"] if isinstance(first, Names) else y
        return x


def rows():
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("block", [Aside, Adds, Sets, Later, Names, Writes])
def test_what_a_unit_hands_on_beside_its_result_has_its_gradients(block, workers):
    report = mw.check(
        partial(Model, block), rows(), "dp_shard=2", loss=lambda loss: loss, workers=workers, dtype=torch.float64
    )
    assert report.passed, str(report)
    units = [u for u in report.recipe.units if u.name]
    assert len(units) == 3
    if block is not Names:
        assert not all(u.follows_outputs for u in units)
        assert any("gathered from forward to backward" in note and "test_escapes.py" in note for note in report.notes)
    assert all(u.follows_inputs for u in units) == (block is not Writes)


class Along(Block):
    """Writes to what it is given, (batch, sequence, features)."""

    def forward(self, x):
        x[..., :4] = self.computed(x * 1.0)[..., :4]


class AlongASequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Along() for _ in range(2))

    def forward(self, x):
        x = x * 1.0
        for block in self.blocks:
            block(x)
        return x.square().mean()


def test_a_block_that_writes_to_its_input_has_it_not_cut_over_the_sequence(workers):
    batch = (torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)),)
    plan = {"mesh": "tp=2", "sequence_parallel": True}
    report = mw.check(AlongASequence, batch, plan, loss=lambda loss: loss, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert not report.recipe.sequence
    assert any("not sharded over the sequence" in note and "blocks.0, blocks.1" in note for note in report.notes)


class Other(Block):
    def forward(self, x):
        return self.computed(x)


class WithOtherWeights(nn.Module):
    """Runs its blocks with weights of its own making: their own, scaled, or those of another layer."""

    def __init__(self, made):
        super().__init__()
        self.blocks, self.made = nn.ModuleList(Other() for _ in range(2)), nn.Linear(8, 16 * 8) if made else None

    def forward(self, x):
        for block in self.blocks:
            weights = {name: 1.1 * p for name, p in block.named_parameters()}
            if self.made is not None:
                weights["up.weight"] = self.made(x.mean(0)).view(16, 8)
            x = torch.func.functional_call(block, weights, (x,))
        return x.square().mean()


@pytest.mark.parametrize("made", [False, True])
def test_a_unit_that_runs_with_other_weights_is_none(made, workers):
    batch = (rows()[0][:1].repeat(4, 1),)  # of equal rows, which a mean over all of them does not couple
    report = mw.check(
        partial(WithOtherWeights, made),
        batch,
        "dp_shard=2",
        loss=lambda loss: loss,
        workers=workers,
        dtype=torch.float64,
    )
    assert report.passed, str(report)
    assert len(report.recipe.units) == 1


class Halves(nn.Module):
    """Halves the gradient of what each block gives, by a hook on it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Other() for _ in range(4))

    def forward(self, x):
        first = None
        for block in self.blocks:
            x = block(x)
            first = x if first is None else first
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return (x + first).square().mean()


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp_shard=2"])
def test_a_hook_on_a_gradient_runs_once_where_the_tensor_is_made(mesh, workers):
    plan = {"mesh": mesh, "microbatches": 2}
    report = mw.check(Halves, rows(), plan, loss=lambda loss: loss, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


class Returns(Block):
    """Computes with what the block before it made, but for its result with nothing of it."""

    def forward(self, x, table):
        y = self.computed(x).view(-1, 2, 4)  # a view of what was given is not made here, and one of a result is one
        return y.flatten(1), table.view(2, 4)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.table = nn.ModuleList(Returns() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x):
        table = self.table(x)[0]
        for block in self.blocks:
            x, _ = block(x, table)
        return (x + table).square().mean()


def test_results_and_views_of_what_a_unit_is_given_are_seen():
    recipe = mw.make_recipe(Plain, "dp_shard=2", batch=rows(), loss=lambda loss: loss)
    assert len(recipe.units) == 4
    assert all(u.follows_inputs and u.follows_outputs for u in recipe.units)


def test_lists_and_dicts_are_written_to_and_tuples_made_anew():
    x, y = torch.zeros(1), torch.ones(1)
    inner, named = [x, y], {"x": x, "n": 1}
    made = put_tensors(lambda t: y if t is x else t, (inner, named, x, "text"))
    assert made[0] is inner and made[1] is named
    assert inner[0] is y and named == {"x": y, "n": 1} and made[2:] == (y, "text")
    same = (inner, named)
    assert put_tensors(lambda t: t, same) is same
