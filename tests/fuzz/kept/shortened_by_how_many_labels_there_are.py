import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 11)

    def forward(self, x, ids, labels):
        h = self.a(x).tanh()
        n = labels[labels >= 0].numel()
        h = h.flatten(0, 1)[:n]
        return {"loss": self.b(h).square().sum() / n}
