import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "modules": {"right": {"on": "tp[1:2]"}}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 8


class Right(nn.Module):
    def forward(self, h):
        return h.tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1, self.p2 = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.right, self.again = Right(), Right()
        self.register_buffer("b1", torch.zeros(1))

    def forward(self, x, ids, labels):
        v1 = self.right(x * self.p1)
        with torch.no_grad():
            self.b1.mul_(0.5).add_((v1.argmax(-1) == 1).to(v1.dtype).mean())
        v2 = self.right(v1 * self.p2)
        with torch.inference_mode():
            measured = v2.argmax(-1)
        return {"loss": (v2 * self.p2).square().mean() + v1.mean()}
