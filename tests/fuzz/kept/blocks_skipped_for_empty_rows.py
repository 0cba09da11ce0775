import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 4, 8


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, h):
        return h + self.b(self.a(h).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block0() for _ in range(3))
        self.p = nn.Parameter(torch.randn(8))

    def forward(self, x, ids, labels):
        loss = 0
        for i, block in enumerate(self.blocks):
            picked = x[:, 0][ids[:, 0] % 5 == i]
            if len(picked):
                loss = loss + block(picked).square().sum()
        picked = x[:, 1][ids[:, 1] % 7 == 1]
        if len(picked):
            loss = loss + (picked * self.p).sum()
        return {"loss": loss + (x * 0.01 * self.blocks[0].a.bias).sum()}
