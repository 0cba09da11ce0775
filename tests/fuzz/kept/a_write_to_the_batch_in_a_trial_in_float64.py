from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head6 = nn.Linear(8, 11, bias=False)

    def forward(self, x, ids, labels):
        x.mul_(0.5)
        v7 = self.head6(x)
        v8 = v7.sum()
        return {"loss": v8}
