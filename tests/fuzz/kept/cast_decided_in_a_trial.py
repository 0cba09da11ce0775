import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 2}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(12, 6) * 0.4)
        self.p6 = nn.Parameter(torch.randn(3, 12) * 0.4)

    def forward(self, x, ids, labels):
        v2 = F.linear(x, self.p1)
        v5 = v2.to(torch.float64).float()
        v7 = F.linear(v5, self.p6)
        v8 = v2.square().mean()
        return {"loss": v8}
