from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, ids, labels):
        v1 = self.a(x).square()
        v2 = v1.mean((0, 1))
        v3 = torch.vmap(lambda t: t / t.detach())(v2)
        return {"loss": v3.mean()}
