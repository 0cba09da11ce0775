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
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x, ids, labels):
        v1 = self.norm(x.transpose(1, 2)).transpose(1, 2)
        v2 = self.linear(v1.clone())
        v3 = v1.reshape(v1.shape[0], -1)
        v3.zero_()
        return {"loss": (v1 + v2).square().mean()}
