from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 6


class Block5(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.zeros(6))

    def forward(self, h):
        v1 = h * 1.0
        v3 = v1 + self.b2
        self.b2.lerp_(h.detach().mean((0, 1)), 0.1)
        return v3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.right4 = Block5()
        self.table15 = nn.Embedding(11, 6)

    def forward(self, x, ids, labels):
        v6 = self.right4(x)
        v8 = torch.func.grad(lambda t: t.tanh().square().sum())(v6)
        v16 = self.table15(ids)
        v20 = v16.square().mean()
        return {"loss": v20}
