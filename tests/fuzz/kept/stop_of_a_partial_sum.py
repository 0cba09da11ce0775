from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query1 = nn.Linear(6, 8)

    def forward(self, x, ids, labels):
        v2 = self.query1(x)
        v15 = x.square().mean()
        v16 = v2.sum()
        v18 = v16 / v16.detach()
        v19 = v15 + 0.5 * v18
        return {"loss": v19}
