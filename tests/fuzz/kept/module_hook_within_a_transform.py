from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 8
PRECISE = False


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp3 = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(0.0))
        self.mlp3.register_full_backward_hook(lambda m, into, of: tuple(None if g is None else g * 0.5 for g in into))

    def forward(self, h):
        v1 = h * 1.0
        with torch.no_grad():
            v2 = torch.where(v1 > v1, v1, v1)
            v1.transpose_(1, -1)
            n4 = self.mlp3
            n5 = dict(n4.named_parameters())
            v6 = torch.vmap(lambda t: torch.func.functional_call(n4, n5, (t,)))(h)
        return v6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.values7 = nn.Linear(8, 3)
        self.right22 = Block1()

    def forward(self, x, ids, labels):
        v8 = self.values7(x)
        v24 = self.right22(v8)
        v28 = v8.square().mean()
        return {"loss": v28}
