import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, h):
        flat = h.flatten(0, 1)
        which = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (which == i).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(flat[rows]))
        return out.view_as(h)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.routed = Experts()
        self.last = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        return {"loss": self.last(self.routed(self.first(x))).square().mean()}
