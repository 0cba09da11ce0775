import torch
import torch.nn.functional as F
from torch import nn

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 6


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, g):
        x, p = ctx.saved_tensors
        return None, (g * x).flatten(0, -2).sum(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Linear(6, 6), nn.Linear(6, 6)
        self.p = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 6)

    def forward(self, x, ids, labels):
        h = self.body(self.stem(x).tanh())
        return {"loss": self.head(Stop.apply(h, self.p)).square().mean()}
