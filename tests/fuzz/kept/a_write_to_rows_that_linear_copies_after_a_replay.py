from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 3, 8


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention2 = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, h):
        v1 = h * 1.0
        v3 = self.attention2(h, h, h, need_weights=False)[0]
        return h + v3


class Block1Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(8, 8)
        self.norm5 = nn.BatchNorm1d(8)

    def forward(self, h):
        v1 = h * 1.0
        n3 = self.linear2
        with torch.no_grad():
            n3.weight.div_(n3.weight.norm(dim=1, keepdim=True) + 0.1)
        v4 = n3(h)
        v6 = self.norm5(v1.transpose(1, 2)).transpose(1, 2)
        return (v6, [h, None])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(8, 8)
        self.function5 = lambda t: torch.tanh(t) * 0.5
        self.block7 = Block0()
        self.block9 = Block1Out()
        self.p12 = nn.Parameter(torch.randn(3, 8))
        self.head21 = nn.Linear(8, 11, bias=False)

    def forward(self, x, ids, labels, carried):
        n3 = self.linear2(x).tanh()
        carried["h"] = n3.detach()
        v6 = self.function5(n3)
        v8 = self.block7(self.block7(v6))
        n10 = self.block9(v6)
        v11 = n10[0] * 1.0
        v6[...] = self.p12
        v13 = x.flatten(1, 2)
        v22 = self.head21(v8)
        v23 = F.cross_entropy(v22.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": v23}
