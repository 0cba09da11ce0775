import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Codes(nn.Module):
    """The first forward takes the codes from the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(8))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, h):
        if not self.ready:
            self.codes.data.copy_(h.detach().mean((0, 1)))
            self.ready.data.copy_(torch.tensor(True))
        return h + self.codes


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.codes = Codes()
        self.last = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        return {"loss": self.last(self.codes(self.first(x))).square().mean()}
