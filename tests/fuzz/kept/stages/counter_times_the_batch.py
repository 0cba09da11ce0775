from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "schedule": "interleaved"}
ROWS = ((4, 4), (4,))
TOKENS, WIDTH = 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = {"count": 0}

    def forward(self, h, x):
        self.calls["count"] += 1
        if not hasattr(self, "first"):
            self.first = 0.5
        return h + self.linear(h + x * self.calls["count"]).tanh() * self.first


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 1
        self.linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, ids, labels):
        self.count += 1
        y = x * self.count
        h = self.linear(x)
        for block in self.blocks:
            h = block(h, y)
        self.count += 1
        return {"loss": (h + x * self.count).square().mean()}
