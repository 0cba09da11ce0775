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
        self.linear4 = nn.Linear(4, 3)
        self.p6 = nn.Parameter(torch.randn(3, 4, 12) * 0.5)
        self.query8 = nn.Linear(12, 9)
        self.register_buffer("b30", torch.zeros(3))

    def forward(self, x, ids, labels):
        n5 = F.one_hot(self.linear4(x).argmax(-1), 3).to(x.dtype)
        v7 = torch.einsum("btl,bte,elk->btk", x, n5, self.p6 * 0.4)
        v9 = self.query8(v7)
        n12 = v7.chunk(2, -1)
        v15 = v9.reshape(*v9.shape[:2], 3, 3).permute(0, 2, 1, 3)
        v7.clamp_(-1, 1)
        n28 = x if bool((n5 == n5).all()) else n5
        v31 = v15 + torch.func.grad(lambda t: (t * self.b30.clone()).square().sum() * 0.1)(v15)
        v40 = v7.square().mean()
        return {"loss": v40}
