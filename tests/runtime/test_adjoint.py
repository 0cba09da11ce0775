"""A Function that is given parameters, and whose backward runs the module that has them and asks for gradients by what it was
given (an adjoint of an ODE, a reversible block)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw

WIDTH = 6


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        return None, *torch.autograd.grad(y, (x, *parameters), g, allow_unused=True)


class Adjoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        h = Again.apply(self.inner, self.first(x), *self.inner.parameters())
        return {"loss": (self.last(h) - x).square().mean()}


def sample():
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "pp=2", "pp=2,tp=2", "dp_shard=2,tp=2"])
def test_gradients_by_what_a_function_was_given_are_those_of_one_device(mesh, workers):
    report = mw.check(Adjoint, sample(), mesh, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


def test_what_a_function_is_given_cannot_be_cut_by_the_plan():
    plan = {"mesh": "tp=2", "modules": {"inner.0": {"tp": "column"}}}
    with pytest.raises(mw.PlanError, match="Again is given it, and takes it from its module as well"):
        mw.make_recipe(Adjoint, plan, sample())
