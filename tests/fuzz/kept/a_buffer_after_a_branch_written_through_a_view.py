from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "modules": {"left6": {"on": "tp[0:1]"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        v1 = h * 1.0
        return v1


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.zeros(2, 8))

    def forward(self, h):
        v1 = h * 1.0
        n3 = self.b2
        n3[0].copy_(h.detach().flatten(0, -2).amax(0))
        return v1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 2)
        self.linear2 = nn.Linear(2, 8)
        self.left6 = Block0()
        self.blocks15 = nn.ModuleList(Block2() for _ in range(2))

    def forward(self, x, ids, labels):
        v3 = self.linear1(x)
        v5 = self.linear2(v3)
        v8 = self.left6(v5)
        n14 = [v8]
        for block in self.blocks15:
            n14.append(block(n14[-1]))
        v22 = v3.square().mean()
        return {"loss": v22}
