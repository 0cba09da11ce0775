from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(4, 12)
        self.frozen3 = nn.Linear(4, 12).requires_grad_(False)
        self.linear21 = nn.Linear(4, 3)

    def forward(self, x, ids, labels, carried):
        n2 = self.linear1
        n4 = self.frozen3
        n4.weight.data = 0.9 * n4.weight.data + 0.1 * n2.weight.data
        carried["count"] = carried.get("count", 0) + 1
        v22 = self.linear21(x) / carried["count"]
        v28 = v22.sum()
        return {"loss": v28}
