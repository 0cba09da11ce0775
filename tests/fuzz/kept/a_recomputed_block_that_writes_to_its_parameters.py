from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "recompute": "blocks"}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 8


class Block4(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(8))
        self.linear4 = nn.Linear(8, 4)
        self.frozen6 = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, h):
        v3 = torch.maximum(h, self.p2)
        n5 = self.linear4
        n7 = self.frozen6
        with torch.no_grad():
            [q.lerp_(p, 0.1) for p, q in zip(n5.parameters(), n7.parameters())]
        v8 = h.square().mean()
        return v3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks5 = nn.ModuleList(Block4() for _ in range(2))

    def forward(self, x, ids, labels):
        v6 = x.sum()
        for block in self.blocks5:
            v6 = block(v6)
        v16 = x.sum()
        v17 = v6.square().mean()
        v18 = v16 + 0.5 * v17
        return {"loss": v18}
