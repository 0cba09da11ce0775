import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 8


class Bias(nn.Module):
    """Keeps what it made for the longest sequence so far; every block asks it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self.calls = 0

    def forward(self, n):
        self.calls += 1
        if self.bias is None or len(self.bias) < n:
            made = torch.arange(n)[:, None] - torch.arange(n)
            self.register_buffer("bias", made, persistent=False)
        return self.bias[:n, :n]


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias
        self.linear = nn.Linear(8, 8)

    def forward(self, h):
        with torch.autocast(h.device.type, enabled=False):
            bias = self.bias(h.shape[1]) * torch.ones(1, device=self.linear.weight.device)
            return h + (bias * 0.1).to(h.dtype) @ self.linear(h)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        bias = Bias()
        self.blocks = nn.ModuleList(Block(bias) for _ in range(4))

    def forward(self, x, ids, labels):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}
