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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p15 = nn.Parameter(torch.randn(11, 8) * 0.5)

    def forward(self, x, ids, labels):
        n16 = F.embedding(ids, self.p15, padding_idx=0)
        v17 = x * n16
        with torch.no_grad():
            torch.mul(v17, 0.5, out=n16)
        v34 = v17.square().mean()
        return {"loss": v34}
