from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 6
PRECISE = False


@dataclass
class Output:
    out: Any
    extra: Any = None


class Block0Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(6, 6)

    def forward(self, h):
        v4 = self.linear3(h)
        return Output(h + v4, h.shape[-1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block2 = Block0Out()

    def forward(self, x, ids, labels):
        v3 = self.block2(x).out
        v4 = v3.square().mean()
        v6 = v4 / v4.detach()
        return {"loss": v6}
