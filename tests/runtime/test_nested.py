"""Nested (jagged) tensors in a forward: rows of different lengths without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

LENGTHS = [2, 4, 5, 3]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.a, self.b, self.end = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mid(self.begin(x).tanh())).square().mean()


class FromRows(Base):
    def mid(self, h: Tensor) -> Tensor:
        rows = [row[:length] for row, length in zip(h, LENGTHS, strict=True)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return self.b(torch.nested.to_padded_tensor(self.a(nested), 0.0))


class FromOffsets(Base):
    def mid(self, h: Tensor) -> Tensor:
        offsets = torch.tensor([0, 3, 8, h.shape[0] * h.shape[1]])
        nested = torch.nested.nested_tensor_from_jagged(self.a(h).flatten(0, 1), offsets)
        return self.b(nested.values()).view(h.shape)


class Ends(FromRows):
    def forward(self, x: Tensor) -> Tensor:
        return self.mid(x).square().mean()


@pytest.mark.parametrize("model", [FromRows, FromOffsets, Ends])
@pytest.mark.parametrize(
    "mesh", ["pp=2", "pp=3", *(pytest.param(m, marks=pytest.mark.proof) for m in ("pp=4", "tp=2", "dp_shard=2"))]
)
def test_a_nested_tensor_is_made_and_used_in_one_stage(model: Any, mesh: str, workers: LocalWorkers) -> None:
    """Whichever it is: the others have none, and no placeholder of it."""
    if model is Ends and mesh == "pp=4":
        pytest.skip("has two parameters")
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    report = mw.check(model, (x,), mesh, loss=lambda out: out, dtype=torch.float64, workers=workers)
    assert report, report
