import torch
from torch import nn

PLAN = {"mesh": {"tp": 2}, "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:2]"}}}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 5, 6


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h):
        return torch.fft.irfft(torch.fft.rfft(self.linear(h), dim=1), n=5, dim=1)  # not contiguous


class Side(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h):
        return self.linear(h).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Spectrum(), Side()
        self.head = nn.Linear(6, 11)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x, ids, labels):
        both = self.left(x) + self.right(x)
        self.seen.lerp_(both.detach().mean((0, 1)), 0.1)  # the order of this sum follows from strides
        return {"loss": self.head(both + self.seen).square().mean()}
