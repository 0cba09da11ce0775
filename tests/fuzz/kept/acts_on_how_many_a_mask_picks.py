from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p3 = nn.Parameter(torch.randn(6))
        self.register_buffer("b24", torch.ones(4))
        self.head27 = nn.Linear(6, 11, bias=False)

    def forward(self, x, ids, labels):
        n1 = x[ids > 5]
        if len(n1) > 9:
            v2 = x * self.p3
        v21 = x.sum()
        self.b24.lerp_(v21.detach().mean((0,)), 0.1)
        v28 = self.head27(x)
        v29 = v28.sum()
        return {"loss": v29}
