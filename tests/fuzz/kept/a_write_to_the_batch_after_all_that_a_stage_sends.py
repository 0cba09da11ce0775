from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.tensor(0.7))
        self.linear8 = nn.Linear(8, 8)
        self.linear9 = nn.Linear(8, 8)
        self.linear10 = nn.Linear(8, 8)
        self.linear12 = nn.Linear(8, 8)
        self.linear13 = nn.Linear(8, 8)
        self.head41 = nn.Linear(8, 11, bias=False)

    def forward(self, x, ids, labels, carried):
        v3 = x * self.p2
        n12 = carried.setdefault("sum", torch.zeros_like(x))
        n12.add_(v3.detach())
        for m in (self.linear8, self.linear9, self.linear10, self.linear12, self.linear13):
            m(x)
        v42 = self.head41(v3)
        v43 = F.cross_entropy(v42[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": v43}
