from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "schedule": "interleaved"}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear4 = nn.Linear(5, 3)
        self.linear4.weight.register_hook(lambda g: g.mul(0.5).add(0.01))
        self.embedding22 = nn.Embedding(5, 3)

    def forward(self, x, ids, labels):
        n5 = self.linear4
        n5.weight.data = 0.9 * n5.weight.data + 0.1 * n5.weight.data
        n21 = torch.bucketize(x.detach(), torch.linspace(-1, 1, 4, dtype=x.dtype))
        v23 = self.embedding22(n21).flatten(-2)
        v28 = v23.sum()
        return {"loss": v28}
