"""The ``mymodel`` of the documentation: a model, a batch and rows, in place of a reader's own.

To run code of a page, put it into a file in this folder: ``from mymodel import build, sample, dataset`` finds this one there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Eight numbers a row, and the one that is to be learnt of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(self.head(x), y)


def build() -> nn.Module:
    return Model()


def rows(count: int) -> dict[str, Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


sample, dataset = rows(8), rows(64)


def model() -> tuple[object, ...]:
    return build, sample, dataset


def main() -> None:
    """Trains it in this one process, as the pages do over several."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 51):
        loss = model(**dataset)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
