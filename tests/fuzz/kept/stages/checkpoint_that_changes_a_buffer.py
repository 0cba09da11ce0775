import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, h):
        self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = Block()
        self.last = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        h = checkpoint(self.block, self.first(x), use_reentrant=True)
        return {"loss": self.last(h).square().mean()}
