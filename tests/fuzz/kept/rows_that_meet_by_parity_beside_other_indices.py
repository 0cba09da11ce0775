from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p3 = nn.Parameter(torch.randn(6) * 0.5)

    def forward(self, x, ids, labels):
        n1 = ids[..., None].expand(-1, -1, 6)
        n2 = x.new_zeros(x.shape[0], 11, 6).scatter_add(1, n1, x)
        v4 = n2.gather(1, n1) * self.p3
        v5 = x.take_along_dim(x.argsort(2), 2)
        v7 = (x * v4).sum(1) / v4.sum(1).clamp(min=1)
        v10 = -F.logsigmoid(v7.mean(1) * ((ids.sum(1, keepdim=True) % 2) * 2 - 1)).mean()
        return {"loss": v10}
