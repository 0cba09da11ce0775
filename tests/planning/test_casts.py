"""A forward that casts a module to another type is one error of ``parallelize``, with the model's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "cast":
            self.linear.to(torch.bfloat16)
            return self.linear(x.bfloat16()).float()
        if self.how == "there and back":
            y = self.linear.double()(x.double()).float()
            self.linear.float()
            return y
        if self.how == "after":
            y = self.linear(x)
            self.linear.to(torch.bfloat16)
            return y
        if self.how == "back at once":
            return self.linear.double().float()(x)  # type: ignore[no-any-return]
        if self.how == "for the call":
            weights = {n: p.to(torch.bfloat16) for n, p in self.linear.named_parameters()}
            return torch.func.functional_call(self.linear, weights, x.bfloat16()).float()
        return self.linear.to(x.dtype).to(x.device)(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def planned(how: str, mesh: str) -> Any:
    return mw.make_recipe(lambda: Model(how), mesh, batch={"x": torch.randn(4, 8)}, loss=lambda y: y)


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp_shard=2"])
@pytest.mark.parametrize("how", ["cast", "there and back", "after"])
def test_a_module_that_a_forward_casts_is_an_error_with_its_line(how: str, mesh: str) -> None:
    with pytest.raises(mw.PlanError) as raised:
        planned(how, mesh)
    finding = next(f for f in raised.value.findings if "a forward that casts parameters to torch." in f.given)
    assert "planning/test_casts.py:" in finding.where
    assert "blocks.0.linear.weight" in finding.given


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp_shard=2"])
@pytest.mark.parametrize("how", ["back at once", "for the call", "to what it is"])
def test_casts_that_leave_parameters_as_they_are_pass(how: str, mesh: str) -> None:
    planned(how, mesh)


def test_one_process_may_cast() -> None:
    planned("cast", "dp_shard=1")
