from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 3}
ROWS = ((6,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears_by_name5 = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("left", "right")})
        self.register_buffer("b8", torch.zeros(4))
        self.head13 = nn.Linear(4, 11, bias=False)

    def forward(self, x, ids, labels):
        x.zero_()
        v6 = (
            x * x.sigmoid()
            + (ids % 2 == 0)[..., None] * self.linears_by_name5["left"](x)
            + torch.where((ids % 2 == 1)[..., None], self.linears_by_name5["right"](x), 0)
        )
        self.b8 = 0.9 * self.b8 + 0.1 * v6.detach().mean((0, 1))
        v9 = x + self.b8
        v14 = self.head13(v9)
        v15 = v14.square().mean()
        return {"loss": v15}
