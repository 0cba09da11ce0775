from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear5 = nn.Linear(8, 10)

    def forward(self, x, ids, labels):
        v6 = self.linear5(x)
        v11 = v6.square().mean()
        v12 = x.square().mean()
        v14 = (v12 - 0.9612).abs()
        v15 = v11 + 0.5 * v14
        return {"loss": v15}
