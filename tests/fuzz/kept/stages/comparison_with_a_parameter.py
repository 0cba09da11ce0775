import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.bound = nn.Parameter(torch.randn(6))
        self.last = nn.Linear(6, 2)

    def forward(self, x, ids, labels):
        h = self.first(x)
        h = torch.where(h > self.bound, h, self.bound) + torch.where(x[..., :6] <= h, h, 0.1)
        return {"loss": self.last(h).square().mean()}
