from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8
PRECISE = False


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p.tanh()

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p.tanh() * 0.9, (g * x * (1 - p.tanh() ** 2)).flatten(0, -2).sum(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(8, 3)
        self.p6 = nn.Parameter(torch.randn(8))

    def forward(self, x, ids, labels):
        self.linear3.weight.data.clamp_(-0.5, 0.5)
        v4 = self.linear3(x)
        v7 = Bent.apply(x, self.p6)
        v13 = v7.sum()
        return {"loss": v13}
