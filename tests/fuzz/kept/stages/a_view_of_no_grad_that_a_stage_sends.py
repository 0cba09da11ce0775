from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(6, 5)

    def forward(self, x, ids, labels):
        n2 = self.linear1
        v3 = n2(x)
        with torch.no_grad():
            v6 = v3.reshape(v3.shape[0], -1)
            v6.mul_(v6.detach())
            v7 = v6.flatten(1)
        v15 = v3.sum()
        return {"loss": v15}
