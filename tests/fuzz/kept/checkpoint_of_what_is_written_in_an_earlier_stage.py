from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b6", torch.ones(4))

    def forward(self, h):
        v1 = h * 1.0
        v2 = v1.narrow(2, 3, 1)
        v2.tanh_()
        self.b6.lerp_(v1.detach().mean((0, 1)), 0.1)
        return h + v1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm2 = nn.RMSNorm(4)
        self.block4 = Block0()

    def forward(self, x, ids, labels):
        v3 = self.norm2(x)
        v3.zero_()
        v5 = checkpoint(self.block4, v3, use_reentrant=True)
        v13 = v5.square().mean()
        return {"loss": v13}
