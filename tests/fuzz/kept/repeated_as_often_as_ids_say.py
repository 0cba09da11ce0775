import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        h = self.a(x)
        longer = h.repeat_interleave(ids[0] % 3 + 1, dim=1)
        n = longer.shape[1]
        p = longer.sum()
        return {"loss": (self.b(h).square().sum() + p) / n}
