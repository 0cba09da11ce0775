import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((5,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(6, 8) * 0.4)

    def forward(self, x, ids, labels):
        v3 = x @ self.p2
        v14 = v3.square().mean()
        v15 = (x.square().sum(-1) * (ids > 2)).sum() / (ids > 2).sum().clamp(min=1)
        v16 = v14 + 0.5 * v15
        return {"loss": v16}
