import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 5, 6


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.new = nn.Linear(6, 6), None
        self.register_buffer("average", torch.zeros(6))

    def forward(self, h):
        self.new = h.detach().mean((0, 1))
        return h + self.linear(h - self.average).tanh()

    def update(self):
        self.average.lerp_(self.new, 0.1)
        self.new = None


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(4))
        self.register_full_backward_hook(lambda *_: [part.update() for part in self.parts] and None)

    def forward(self, h):
        for part in self.parts:
            h = part(h)
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.parts, self.last = nn.Linear(6, 6), Parts(), nn.Linear(6, 6)

    def forward(self, x, ids, labels):
        return {"loss": self.last(self.parts(self.first(x))).square().mean()}
