from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(4, 12)
        self.linear5 = nn.Linear(12, 24)

    def forward(self, h):
        v3 = self.linear2(h)
        v6 = self.linear5(v3)
        n7 = v6.split(12, -1)
        v8 = torch.sigmoid(n7[0]) * n7[1]
        with torch.no_grad():
            v9 = v8.tensor_split(2, 2)[0]
        return v9


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.right2 = Block1()

    def forward(self, x, ids, labels):
        v4 = self.right2(x)
        v12 = v4.square().mean()
        return {"loss": v12}
