from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(8, 8, 6) * 0.2)

    def forward(self, x, ids, labels):
        v3 = torch.einsum("bni,bnj,ijk->bnk", x, x, self.p2) * 0.2
        x.add_(x)
        v7 = v3.sum()
        return {"loss": v7}
