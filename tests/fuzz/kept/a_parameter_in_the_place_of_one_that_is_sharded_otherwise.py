from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 2}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear4 = nn.Linear(6, 6)
        self.p5 = nn.Parameter(torch.randn(6, 6) * 0.3)

    def forward(self, x, ids, labels):
        v6 = torch.func.functional_call(self.linear4, {"weight": self.p5}, (x,))
        v15 = v6.square().mean()
        return {"loss": v15}
