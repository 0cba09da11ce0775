import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4


class Block0(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        return h + h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.both3 = nn.Linear(4, 8)
        self.block17 = Block0()

    def forward(self, x, ids, labels):
        v4 = self.both3(x)
        v18 = checkpoint(self.block17, v4, use_reentrant=False)
        v26 = v4.sum()
        return {"loss": v26}
