from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4, 4), (4,))
TOKENS, WIDTH = 4, 4


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))

    def forward(self, h):
        h = self.linear(h)
        self.average.lerp_(h.detach().mean((0, 1)), 0.1)
        return h


class Scaled(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.others = [other]

    def forward(self, h):
        return self.linear(h) * self.others[0].average


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.averaged = Averaged()
        self.scaled = Scaled(self.averaged)
        self.two = nn.Linear(4, 4)

    def forward(self, x, ids, labels):
        h = self.averaged(self.one(x))
        return {"loss": self.two(self.scaled(h)).square().mean()}
