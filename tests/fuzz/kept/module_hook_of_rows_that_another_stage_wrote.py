from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(5, 2))
        self.linear2 = nn.Linear(4, 4)
        self.linear2.register_full_backward_hook(lambda m, into, of: None)

    def forward(self, x, ids, labels):
        x[:, :, 2:] = self.p1
        n3 = self.linear2
        n4 = n3(x)
        v5 = x + 0.1 if self.training else x * n3.weight.mean()
        v33 = x.square().mean()
        return {"loss": v33}
