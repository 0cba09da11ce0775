import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(6, 2)

    def forward(self, h):
        v4 = self.linear2(h)
        v9 = h * 1.0
        v10 = v9.clamp(-1, 1)
        v9 += h
        return v10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks3 = nn.ModuleList(Block1() for _ in range(3))
        self.linear5 = nn.Linear(6, 5)

    def forward(self, x, ids, labels):
        v4 = x * 1.0
        for block in self.blocks3:
            v4 = block(v4)
        v6 = self.linear5(v4)
        v7 = x.square().mean(-1).masked_select(labels >= 0).mean()
        v8 = v6.sum()
        v9 = v7 + 0.5 * v8
        return {"loss": v9}
