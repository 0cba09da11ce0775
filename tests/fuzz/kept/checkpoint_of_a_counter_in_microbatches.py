from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.tensor(0.5))
        self.p6 = nn.Parameter(torch.randn(4, 5) * 0.4)
        self.p7 = nn.Parameter(torch.randn(5, 4) * 0.4)

    def forward(self, h):
        self.b2.add_(0.25)
        v8 = torch.linalg.multi_dot([h.flatten(0, 1), self.p6, self.p7]).unflatten(0, h.shape[:2])
        return v8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block4 = Block0()

    def forward(self, x, ids, labels):
        v5 = checkpoint(self.block4, x, use_reentrant=False)
        v10 = v5.square().mean()
        return {"loss": v10}
