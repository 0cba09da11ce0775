from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(6, 6)
        self.linear3.weight.register_hook(lambda g: g.mul(0.5).add(0.01))

    def forward(self, x, ids, labels):
        n4 = self.linear3
        n5 = torch.autograd.grad(n4(x).square().mean(), n4.weight, create_graph=True)[0]
        v16 = n5.square().mean()
        return {"loss": v16}
