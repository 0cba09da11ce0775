"""What a model puts on its parameters is found where its forward and an optimizer look for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw

WIDTH = 6


class Marked(nn.Module):
    """Computes with an attribute of a parameter; another says how an optimizer is to treat one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scale.power = 3
        self.last.bias._no_weight_decay = True

    def forward(self, x):
        y = self.last(self.first(x).tanh()) * self.scale**self.scale.power
        return {"loss": (y - x).square().mean()}


def sample():
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))}


def without_decay(plan):
    job = mw.parallelize(Marked, plan, batch=sample())
    return sorted(n for n, p in job.named_parameters() if getattr(p, "_no_weight_decay", False)), job.recipe.stages


PLANS = ["dp_shard=2", "dp_replicate=2", "tp=2", "pp=2"]


@pytest.mark.parametrize("mesh", PLANS)
def test_a_forward_computes_with_attributes_of_parameters(mesh, workers):
    report = mw.check(Marked, sample(), mesh, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


@pytest.mark.parametrize("mesh", PLANS)
def test_an_optimizer_finds_attributes_of_parameters(mesh, workers):
    ranks = workers.run(without_decay, mesh, ranks=2)
    assert sorted({name for names, _ in ranks for name in names}) == ["last.bias"]


class Doubled(nn.Parameter):
    def doubled(self):
        return self * 2


class OwnClass(Marked):
    def __init__(self):
        super().__init__()
        self.more = Doubled(torch.ones(WIDTH))


class Weighing(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output):
        return output["loss"] * self.temperature


def test_a_parameter_of_a_class_with_methods_is_an_error_of_the_plan():
    with pytest.raises(mw.PlanError, match="class Doubled, which has doubled"):
        mw.make_recipe(OwnClass, "dp_shard=2", sample())


def test_a_loss_with_parameters_is_an_error_of_the_plan():
    with pytest.raises(mw.PlanError, match="temperature"):
        mw.make_recipe(Marked, "dp_shard=2", sample(), Weighing())
    mw.make_recipe(Marked, "dp_shard=2", sample(), lambda output: output["loss"])
