import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b3", torch.ones(6))

    def forward(self, h):
        v1 = h * 1.0
        self.b3.mul_(0.9).add_(v1.detach().mean((0, 1)), alpha=0.1)
        return h + v1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table3 = nn.Embedding(11, 12)
        self.block12 = Block0()

    def forward(self, x, ids, labels):
        x.transpose_(1, -1)
        v4 = self.table3(ids)
        v13 = checkpoint(self.block12, ids, use_reentrant=False)
        v17 = v4.sum()
        return {"loss": v17}
