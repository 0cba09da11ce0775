from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {
    "mesh": {"tp": 2},
    "sequence_parallel": True,
    "microbatches": 3,
    "modules": {"linear2": {"tp": "column"}},
    "parameters": {"p5": {"tp": "shard:0"}, "p8": {"tp": "shard:1"}},
}
ROWS = ((4, 4), (4,))
TOKENS, WIDTH = 5, 4


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(4, 4)
        self.register_buffer("b5", torch.zeros(4, 4))

    def forward(self, h):
        v1 = h * 1.0
        v2 = v1.cummax(2).values
        n4 = self.linear3
        n6 = self.b5
        n6.mul_(0.9).add_(n4.weight.detach(), alpha=0.1)
        v7 = n4(v1) - F.linear(v1, n6).detach()
        return h + v7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(4, 4)
        self.p5 = nn.Parameter(torch.randn(4))
        self.p8 = nn.Parameter(torch.randn(5, 5, 1) * 0.4)
        self.blocks13 = nn.ModuleList(Block0() for _ in range(2))
        self.prelu15 = nn.PReLU(5)

    def forward(self, x, ids, labels, carried):
        n1 = x + carried.get("h", 0.0)
        n3 = self.linear2(n1).tanh()
        carried["h"] = n3.detach()
        v4 = n3 * 1.0
        v6 = F.rms_norm(v4, (4,), self.p5)
        v7 = torch.hypot(v6, v6 + 1)
        v9 = F.conv1d(v6, self.p8, padding=0, groups=1)
        v10 = F.interpolate(v4, scale_factor=2)
        n11 = carried.get("last", v7.detach())
        carried["last"] = v7.detach().tanh()
        v12 = v7 + 0.5 * n11
        v14 = v12 * 1.0
        for block in self.blocks13:
            v14 = block(v14)
        v16 = self.prelu15(v14)
        v16.fill_diagonal_(0.2) if v16.dim() == 2 else v16.add_(0.1)
        v17 = v10.square().mean(-1)[labels >= 0].mean()
        return {"loss": v17}
