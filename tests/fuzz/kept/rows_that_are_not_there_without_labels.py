import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}, "microbatches": 3}
ROWS = ((5,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(4, 12) * 0.4)

    def forward(self, x, ids, labels):
        v3 = x @ self.p2
        mask = labels >= 0
        v4 = (v3.square().mean(-1) * mask).sum() / mask.sum()
        return {"loss": v4 + F.cross_entropy(v3.flatten(0, 1), labels.flatten())}
