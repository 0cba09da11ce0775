import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(5, 5)

    def forward(self, h):
        v1 = h * 1.0
        return h + self.linear2(v1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p4 = nn.Parameter(torch.randn(5, 1, 1) * 0.4)
        self.blocks12 = nn.ModuleList(Block0() for _ in range(2))

    def forward(self, x, ids, labels):
        v5 = F.conv1d(x, self.p4, padding=0, groups=5)
        v8 = torch.bmm(x, x.mT) * 0.1
        with torch.no_grad():
            v11 = v5[:, :, :1]
        for block in self.blocks12:
            v13 = block(v8)
        v16 = v11.sum()
        return {"loss": v16}
