from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 6


class Block0Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(6, 6)

    def forward(self, h):
        v1 = h * 1.0
        return (h + self.linear2(v1), h)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(6, 10)
        self.linear7 = nn.Linear(10, 3)
        self.block9 = Block0Out()
        self.linear17 = nn.Linear(6, 2, bias=False)

    def forward(self, x, ids, labels):
        v3 = self.linear2(x)
        n4 = torch.tensor_split(v3, 2, dim=-1)
        v5 = torch.sigmoid(n4[0]) * n4[1]
        n6 = v3[labels >= 0]
        v8 = self.linear7(n6).tanh().sum(0) / (len(n6) + 1)
        n10 = self.block9(x)
        v11 = n10[0] * 1.0
        v14 = v5 + v5
        v16 = x.cumsum(1) * 0.3
        v18 = self.linear17(x)
        v19 = F.binary_cross_entropy_with_logits(v14, torch.full_like(v14, 0.3))
        return {"loss": v19}
