from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 8
PRECISE = False


class Decides(nn.Module):
    def __init__(self, inner, sign):
        super().__init__()
        self.inner, self.sign = inner, sign

    def forward(self, h, other):
        made = self.inner(h)
        if (h.square().mean() * self.sign >= 0).item():
            return made, other
        return other, made


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(4, 4)

    def forward(self, h):
        self.linear2.to(h.device)
        v3 = self.linear2(h)
        return v3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 3)
        self.p3 = nn.Parameter(torch.randn(3, 8, 4) * 0.5)
        self.right6 = Decides(Block2(), 1)

    def forward(self, x, ids, labels):
        n2 = F.one_hot(self.linear1(x).argmax(-1), 3).to(x.dtype)
        v4 = torch.einsum("btl,bte,elk->btk", x, n2, self.p3 * 0.4)
        n8 = self.right6(v4, x)
        v11 = n8[0] * 1.0
        v17 = v11.square().mean()
        return {"loss": v17}
