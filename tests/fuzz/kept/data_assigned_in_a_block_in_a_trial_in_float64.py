from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.zeros(1))
        self.linear4 = nn.Linear(24, 24)
        self.linear7 = nn.Linear(24, 12)
        self.frozen9 = nn.Linear(24, 12).requires_grad_(False)

    def forward(self, h):
        v1 = h * 1.0
        n3 = self.b2
        if self.training:
            n3.add_(1)
        n5 = self.linear4(h) * (1 - 0.5 * torch.exp(-n3))
        v6 = torch.tanh(self.linear4(n5)) * (1 - 0.2 * torch.exp(-n3))
        n8 = self.linear7
        n10 = self.frozen9
        n11 = n8(v6) * n10(v6).sigmoid()
        n10.weight.data = 0.9 * n10.weight.data + 0.1 * n8.weight.data
        v12 = n11 * 1.0
        return h + v6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(6, 24)
        self.blocks5 = nn.ModuleList(Block0() for _ in range(2))

    def forward(self, x, ids, labels):
        v2 = self.linear1(x)
        for block in self.blocks5:
            v6 = block(v2)
        v15 = v2.sum()
        return {"loss": v15}
