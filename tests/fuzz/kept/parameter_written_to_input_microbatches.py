import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(5))

    def forward(self, x, ids, labels):
        x[:, :, 5] = self.p1
        v10 = x.sum()
        return {"loss": v10}
