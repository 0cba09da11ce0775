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
        self.b = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        h = self.a(x)
        picked = h[labels >= 0]
        n = picked.shape[0]
        p = picked.sum()
        g = self.b(h)
        return {"loss": (g.square().sum() + p) / n}
