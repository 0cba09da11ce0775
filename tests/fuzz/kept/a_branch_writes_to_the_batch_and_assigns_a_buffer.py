import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "modules": {"left3": {"on": "tp[0:1]"}}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 8


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(8))
        self.register_buffer("b3", torch.zeros(8))

    def forward(self, h):
        h.mul_(self.p1)
        v2 = h * 1.0
        self.b3 = 0.9 * self.b3 + 0.1 * h.detach().mean((0, 1))
        return v2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left3 = Block0()

    def forward(self, x, ids, labels):
        v4 = self.left3(x)
        v13 = x.sum() + v4.sum()
        return {"loss": v13}
