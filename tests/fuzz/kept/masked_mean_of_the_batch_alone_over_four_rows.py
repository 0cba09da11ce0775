import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 2}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear5 = nn.Linear(8, 6)

    def forward(self, x, ids, labels):
        v6 = self.linear5(x)
        v8 = v6.square().mean()
        v9 = (x.square().mean(-1) * (labels >= 0)).sum() / (labels >= 0).sum()
        v10 = v8 + 0.5 * v9
        return {"loss": v10}
