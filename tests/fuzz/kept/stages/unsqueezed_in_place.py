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
        self.first = nn.Linear(8, 6)
        self.last = nn.Linear(4, 6)

    def forward(self, x, ids, labels):
        h = self.first(x)
        h.squeeze_(1) if h.shape[1] == 1 else h.unsqueeze_(1)
        h.transpose_(2, 3)
        return {"loss": self.last(h).square().mean() + h.tanh().mean() * h.shape[2]}
