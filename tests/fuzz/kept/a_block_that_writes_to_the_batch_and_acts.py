import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 4


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h):
        h[:, -1:].mul_(0.5)
        y = self.linear(h)
        if float(y.square().mean()) >= 0:
            y = y * 2
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(4, 4)
        self.a = Writes()
        self.b, self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, ids, labels):
        y = self.e(x * 1.0).tanh()
        y = y + self.a(x)
        y = self.d(self.c(self.b(y).tanh()).tanh())
        return {"loss": (y + x).square().mean()}
