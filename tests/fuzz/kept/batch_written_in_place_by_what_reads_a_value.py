from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(4))

    def forward(self, h):
        h.mul_(self.p1)
        seen = h.square().mean().item()
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left3 = Block0()

    def forward(self, x, ids, labels):
        v4 = self.left3(x)
        v6 = x.sum()
        v7 = v4.sigmoid().mean(0).mean()
        return {"loss": v6}
