from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(6, 3, bias=False)
        self.linear1.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def forward(self, x, ids, labels):
        v2 = self.linear1(x)
        v3 = torch.func.vmap(torch.func.grad(lambda t: t.sin().sum()))(x)
        v7 = v2.square().mean()
        v9 = v7 / v7.detach()
        return {"loss": v9}
