from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b1", torch.zeros(5000))
        self.part2 = self.b1.view(-1)[:4]
        self.linear4 = nn.Linear(4, 12)

    def forward(self, x, ids, labels):
        self.part2[:4].lerp_(x.detach().mean((0, 1)), 0.1)
        n5 = self.linear4(x)
        v14 = n5.square().mean()
        return {"loss": v14}
