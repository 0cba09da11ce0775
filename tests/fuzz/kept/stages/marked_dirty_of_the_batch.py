from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 4


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone(), p)
        return x.mul_(p)

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(1.3))
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x, ids, labels):
        h = self.one(x)
        b = x * 1.0
        c = Scaled.apply(b, self.p)
        h = self.two(h)
        d = b + c
        c.mul_(0.5)
        return {"loss": (h * d + b).square().mean()}
