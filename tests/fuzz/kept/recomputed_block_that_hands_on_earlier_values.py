from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "recompute": "blocks", "microbatches": 2}
ROWS = ((4,), (5,))
TOKENS, WIDTH = 5, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, seen):
        return x + torch.tanh(self.linear(x)), [*seen, x.mean(-1)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, ids, labels):
        seen = []
        for block in self.blocks:
            x, seen = block(x, seen)
        return {"loss": x.square().mean() + seen[-1].square().mean()}
