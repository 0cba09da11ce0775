from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "parameters": {"p2": {"tp": "shard:0"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(6))
        self.function3 = lambda t: t * self.p2

    def forward(self, x, ids, labels):
        v4 = self.function3(x)
        v10 = Doubled.apply(v4)
        v16 = v4.sum()
        return {"loss": v16}
