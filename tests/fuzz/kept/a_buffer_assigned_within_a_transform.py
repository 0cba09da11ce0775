from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 6


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.p3 = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("b5", torch.zeros(6))

    def forward(self, h):
        v1 = h * 1.0
        v2 = v1.mT
        v4 = v1 * self.p3
        self.b5 = 0.9 * self.b5 + 0.1 * v1.detach().mean((0, 1))
        v6 = v4 + self.b5
        return v6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block6 = Block0()

    def forward(self, x, ids, labels):
        v7 = torch.func.grad(lambda t: self.block6(t).square().sum())(x)
        v20 = v7.sum()
        v21 = v7.square().mean()
        return {"loss": v21}
