import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 8


class Block0(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        v7 = h - h[:1]
        return v7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks2 = nn.ModuleList(Block0() for _ in range(2))
        self.head8 = nn.Linear(8, 11, bias=False)

    def forward(self, x, ids, labels):
        n1 = [x]
        for block in self.blocks2:
            n1.append(block(n1[-1]))
        v3 = torch.stack(n1).mean(0)
        v9 = self.head8(v3)
        v10 = F.cross_entropy(v9[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": v10}
