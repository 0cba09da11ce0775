from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, ids, labels):
        v2 = self.a(x).square().mean((0, 1))
        v3 = torch.func.vmap(lambda t: t * 2)(v2.detach())
        v5 = (v2 / v3).mean()
        return {"loss": v5}
