import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:2]"}}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 8


class Left(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(8))

    def forward(self, h):
        h[..., :4].copy_(self.p1[:4].expand_as(h[..., :4]))
        return h.tanh()


class Right(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 8)

    def forward(self, h):
        return self.linear1(h).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 8)
        self.left, self.right = Left(), Right()

    def forward(self, x, ids, labels):
        v1 = self.linear1(x)
        v2 = v1 * 2
        v3 = self.left(v2) + self.right(v1)
        return {"loss": (v3 + v2).square().mean()}
