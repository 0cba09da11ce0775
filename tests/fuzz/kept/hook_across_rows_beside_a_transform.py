from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table2 = nn.Embedding(11, 4)
        self.table2.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def forward(self, x, ids, labels):
        v1 = torch.func.grad(lambda t: t.tanh().square().sum())(x)
        v3 = self.table2(ids)
        v3.register_hook(lambda g: g - g.mean())
        v9 = x.square().mean()
        v14 = v3.square().mean()
        v15 = v9 + 0.5 * v14
        return {"loss": v15}
