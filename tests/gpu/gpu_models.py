"""Models of the tests on a GPU: small ones, of which each shows something that is another code there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS = 32, 48


class Block(nn.Module):
    """Attention, causal, with dropout perhaps; and a linear."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.after, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Decoder(nn.Module):
    """Tied tables; its loss is a mean over labels of which some are ignored; a parameter without dims."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(width, dropout) for _ in range(blocks)), nn.LayerNorm(width)
        self.scale, self.head.weight = nn.Parameter(torch.ones(())), self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x) * self.scale).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """Each row goes to one of two linears, as its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen, out = scores.argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, i, None])
        return out.square().mean()


class Convolutions(nn.Module):
    """Statistics of the batch, which couple its rows; a buffer that forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).square().mean()


class Twins(nn.Module):
    """Two blocks that take nothing of each other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return (a * b).mean()


def itself(out: Tensor) -> Tensor:
    """The loss of a model that returns it."""
    return out


def words(rows: int = 8, length: int = 8) -> dict[str, Any]:
    """Rows of words; the labels of some are ignored."""
    ids = torch.arange(rows * length).view(rows, length) * 7 % WORDS
    labels = ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)
    return {"ids": ids, "labels": labels}


def numbers(*shape: int) -> tuple[Tensor]:
    """Numbers between -1 and 1."""
    return (torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").clamp(-1, 1),)
