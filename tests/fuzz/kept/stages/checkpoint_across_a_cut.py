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
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 8)

    def forward(self, h):
        return h + self.down(self.up(h).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, ids, labels):
        h = self.blocks[0](x)
        h = checkpoint(self.blocks[1], h, use_reentrant=False)
        h = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), h, use_reentrant=True)
        return {"loss": h.square().mean()}
