from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table1 = nn.Embedding(11, 6)
        self.linear2 = nn.Linear(6, 6)

    def forward(self, x, ids, labels):
        v1 = self.table1(ids) + x.mean(-1, keepdim=True)
        n2 = torch.zeros_like(v1)
        with torch.no_grad():
            torch.mul(v1, 0.5, out=x)
            torch.sub(v1, x, out=n2)
        v3 = self.linear2(v1 * n2) + F.relu(input=v1 * 2.0, inplace=True)
        v4 = v3.square().mean() + x.sum() + n2.sum()
        return {"loss": v4}
