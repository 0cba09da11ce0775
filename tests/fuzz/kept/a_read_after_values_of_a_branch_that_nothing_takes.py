import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "modules": {"left16": {"on": "tp[0:1]"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Decides(nn.Module):
    def __init__(self, inner, sign):
        super().__init__()
        self.inner, self.sign = inner, sign

    def forward(self, h, other):
        made = self.inner(h)
        if (h.square().mean() * self.sign >= 0).item():
            return made, other
        return other, made


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.dict2 = nn.ParameterDict(dict(a=torch.randn(12), b=torch.ones(1)))
        self.register_buffer("b5", torch.zeros(12))

    def forward(self, h):
        v1 = h * 1.0
        n3 = self.dict2
        v4 = v1 * n3["a"].softmax(0) + n3["b"]
        self.b5.mul_(0.9).add_(0.1)
        v6 = v4 + self.b5
        return h + v6


class Block3Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(1, 12) * 0.5)
        self.linear4 = nn.Linear(12, 12)
        self.p7 = nn.Parameter(torch.randn(12) * 0.5)
        self.p9 = nn.Parameter(torch.randn(3) * 0.5)
        self.p10 = nn.Parameter(torch.randn(12, 3) * 0.5)

    def forward(self, h):
        v1 = h * 1.0
        n3 = torch.cat([self.p2.expand(h.shape[0], 1, -1), h], 1)
        v5 = self.linear4(n3)[:, 1:] + n3[:, :1]
        n6 = v1 * 1.0
        if float(v1.detach().square().mean()) >= 0:
            n6.mul_(self.p7)
        v8 = n6 + 0.1 * v1
        v11 = torch.addmm(self.p9, v8.flatten(0, 1), self.p10).unflatten(0, v8.shape[:2]) * 0.3
        return (h + v8, h.shape[-1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear10 = nn.Linear(6, 4)
        self.p14 = nn.Parameter(torch.randn(4, 12) * 0.5)
        self.left16 = Decides(Block2(), 1)
        self.block22 = Block3Out()

    def forward(self, x, ids, labels):
        n13 = self.linear10(x)
        v15 = (n13 - n13.logsumexp(-1, keepdim=True)).exp() @ self.p14
        n17 = self.left16(v15, v15)
        v19 = n17[1] * 1.0
        v23 = self.block22(v19)[0]
        v28 = v23.square().mean()
        return {"loss": v28}
