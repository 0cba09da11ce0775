from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((5,), (5,), (5,), (5,))
TOKENS, WIDTH = 4, 6
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear5 = nn.Linear(4, 3, bias=False)
        self.linear7 = nn.Linear(3, 4)

    def forward(self, h):
        v6 = self.linear5(h)
        return h + self.linear7(v6)


class Block1(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left7 = Block0()
        self.right8 = Block1()

    def forward(self, x, ids, labels):
        v6 = x[:, :, :4]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v9 = self.left7(v6)
            v10 = self.right8(v6)
            v11 = v9 + v10
        v17 = v11.sum()
        return {"loss": v17}
