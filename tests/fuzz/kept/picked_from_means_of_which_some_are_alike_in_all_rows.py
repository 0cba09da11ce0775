from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(4, 4)
        self.p8 = nn.Parameter(torch.randn(5, 2))

    def forward(self, x, ids, labels):
        v1 = -x
        v4 = self.linear3(v1) if self.training else v1 * 0.5
        v4[..., :2] = self.p8
        v12 = v4.mean((0, 1)).topk(1).values.sum()
        return {"loss": v12}
