import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 2}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.p = nn.Parameter(torch.randn(6))

    def forward(self, x, ids, labels):
        h = self.a(x)
        scale = self.p.tanh()
        e = (self.b(h).tanh() * scale).sum()
        force = torch.autograd.grad(e, h, create_graph=True)[0]
        return {"loss": self.c(force * scale).square().mean()}
