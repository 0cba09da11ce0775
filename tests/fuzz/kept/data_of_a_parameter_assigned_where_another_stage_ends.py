from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(4, 12)
        self.frozen5 = nn.Linear(4, 12).requires_grad_(False)
        self.head9 = nn.Linear(4, 11, bias=False)

    def forward(self, x, ids, labels):
        n4 = self.linear3
        n6 = self.frozen5
        n7 = n4(x) * n4(x).sigmoid()
        n6.weight.data = 0.9 * n6.weight.data + 0.1 * n4.weight.data
        v10 = self.head9(x)
        v11 = F.cross_entropy(n7[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": v11}
