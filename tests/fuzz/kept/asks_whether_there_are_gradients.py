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
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        h = self.a(x)
        h = h.clone().sub_(x) if torch.is_grad_enabled() else torch.add(h, x)
        h = self.c(self.b(h))
        if not torch.is_grad_enabled():
            h = h * 2 + 1
        return {"loss": h.square().mean()}
