from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "modules": {"left4": {"on": "tp[0:1]"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6
PRECISE = False


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(6))
        self.linear4 = nn.Linear(6, 12)
        self.linear4.register_full_backward_pre_hook(lambda m, of: tuple(None if g is None else g.tanh() for g in of))

    def forward(self, h):
        h.copy_(h.detach().roll(1, 1) + self.p1)
        v2 = h * 1.0
        v3 = torch.einsum(
            "btl,ts->bsl",
            h,
            torch.exp(-torch.cdist(*[torch.arange(float(h.shape[1]), dtype=h.dtype)[:, None]] * 2)).tril(),
        )
        v5 = self.linear4(h)
        v6 = v5 + v5
        return v3


class Block7(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        v1 = h * 1.0
        v2 = h.half()
        v3 = v2.tensor_split(2, 2)[-1]
        v3.sub_(0.3).mul_(2)
        return v2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left4 = Block1()
        self.right25 = Block7()

    def forward(self, x, ids, labels):
        v5 = self.left4(x)
        v7 = x * 1.0
        v27 = self.right25(x)
        v28 = x + v27
        v29 = (v28.logsumexp(-1) - v28.gather(-1, (ids % v28.shape[-1])[..., None]).squeeze(-1)).mean()
        v30 = x.square().mean(-1).masked_select(labels >= 0).mean()
        return {"loss": v29}
