import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x, ids, labels):
        v = self.attention(x, x, x, need_weights=False)[0]
        x.mul_(0.5)
        return {"loss": v.square().sum() / len(x) + x.mean()}
