from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_replicate": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 8
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        v4 = self.linear1(x)
        v4.data.zero_()
        v9 = x.sum()
        v10 = v4.tanh().mean()
        v11 = v9 + 0.5 * v10
        return {"loss": v11}
