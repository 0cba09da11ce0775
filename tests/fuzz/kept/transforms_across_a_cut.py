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
        h = torch.func.vmap(lambda t: t.sin() * scale + self.b(t).mean())(h)
        force = torch.func.grad(lambda t: self.c(t).tanh().square().sum())(h)
        h = h + torch.func.vmap(torch.func.grad(lambda t: (t * scale).sin().sum()))(force)
        h = h + torch.func.jvp(torch.tanh, (h,), (force,))[1]
        return {"loss": self.c(h).square().mean()}
