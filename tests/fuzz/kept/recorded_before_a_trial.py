import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.zeros(2))

    def forward(self, h):
        v1 = h * 1.0
        v3 = h * (self.b2 + 1)
        self.b2.lerp_(v1.detach().mean((0, 1)), 0.1)
        v4 = v3.repeat_interleave(2, dim=1)
        return v3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table3 = nn.Embedding(11, 2)
        self.block5 = Block0()
        self.register_buffer("b7", torch.zeros(2))
        self.p9 = nn.Parameter(torch.randn(2, 12) * 0.4)
        self.query14 = nn.Linear(2, 12)

    def forward(self, x, ids, labels):
        v4 = self.table3(ids)
        v6 = checkpoint(self.block5, v4, use_reentrant=True)
        self.b7 = 0.9 * self.b7 + 0.1 * v4.detach().mean((0, 1))
        v8 = v4 + self.b7
        v10 = torch.einsum("...i,ij->...j", v6, self.p9)
        v15 = self.query14(v8)
        v31 = v15.square().mean()
        return {"loss": v31}
