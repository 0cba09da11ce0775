import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4
PRECISE = False


class Decides(nn.Module):
    def __init__(self, inner, sign):
        super().__init__()
        self.inner, self.sign = inner, sign

    def forward(self, h, other):
        made = self.inner(h)
        if (h.square().mean() * self.sign >= 0).item():
            return made, other
        return other, made


class Block1(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        v1 = h * 1.0
        v2 = v1 * 0.5
        v3 = h.gather(2, (h.detach() > 0).long() % 4)
        return h + v3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp2 = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0))
        self.block4 = Decides(Block1(), -1)

    def forward(self, x, ids, labels):
        v1 = torch.func.grad(lambda t: t.tanh().square().sum())(x)
        v3 = self.mlp2(v1)
        v10 = v3.square().mean()
        v12 = v10 / v10.detach()
        return {"loss": v12}
