import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}, "recompute": "blocks"}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(1, 6)

    def forward(self, h):
        v1 = h * 1.0
        v2 = v1[:, :, :1]
        return h + self.linear3(v2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 2, bias=False)
        self.linear3 = nn.Linear(2, 6)
        self.blocks6 = nn.ModuleList(Block0() for _ in range(2))

    def forward(self, x, ids, labels):
        v2 = self.linear1(x)
        v4 = self.linear3(v2)
        n5 = [v4]
        for block in self.blocks6:
            n5.append(block(n5[-1]))
        v7 = n5[-1] - n5[0]
        v4.transpose_(1, -1)
        v8 = v7.sum()
        return {"loss": v8}
