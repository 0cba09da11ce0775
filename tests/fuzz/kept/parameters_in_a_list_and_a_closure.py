import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2, "tp": 2}}
ROWS = ((4, 4), (4,))
TOKENS, WIDTH = 4, 6


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)
        scale = self.scale
        self.function = lambda t: t * scale

    def forward(self, h):
        return h + self.function(self.linear(h)) * self.scale.tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block0() for _ in range(2))
        self.weights = [block.linear.weight for block in self.blocks]
        self.head = nn.Linear(6, 11)

    def forward(self, x, ids, labels):
        for block in self.blocks:
            x = block(x)
        penalty = sum(w.square().sum() for w in self.weights)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * penalty}
