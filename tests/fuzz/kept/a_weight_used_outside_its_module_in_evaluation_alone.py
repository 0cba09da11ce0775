from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}, "modules": {"linear4": {"dp": "replicate"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear4 = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        n5 = self.linear4
        n6 = n5(x)
        v7 = x + 0.1 if self.training else x * n5.weight.mean()
        v10 = n6.square().mean()
        return {"loss": v10}
