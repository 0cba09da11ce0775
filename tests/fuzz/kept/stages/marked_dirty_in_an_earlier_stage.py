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
        self.linear1 = nn.Linear(4, 4)
        self.linear2 = nn.Linear(4, 4)

    def forward(self, x, ids, labels):
        v1 = self.linear1(x)
        v2 = Doubled.apply(v1)
        v1.mul_(0.5)
        v3 = self.linear2(v2 * 1.0)
        v2.add_(1)
        return {"loss": (v3 * v1).square().mean()}
