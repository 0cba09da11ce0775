from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 8


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(8, 12)
        self.frozen4 = nn.Linear(8, 12).requires_grad_(False)

    def forward(self, h):
        n3 = self.linear2
        n5 = self.frozen4
        n6 = n3(h) * n5(h).sigmoid()
        n5.weight.data = 0.9 * n5.weight.data + 0.1 * n3.weight.data
        v10 = n6.square().mean()
        return v10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(8, 8)
        self.block5 = Block0()

    def forward(self, x, ids, labels, carried):
        n1 = carried.setdefault("means", [])
        n1.append(x.detach().mean((1, 2)))
        v3 = self.linear2(x) + torch.stack(n1).mean(0)[:, None, None]
        v6 = checkpoint(self.block5, v3, use_reentrant=False)
        return {"loss": v6}
