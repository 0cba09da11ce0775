import torch
from torch import nn

PLAN = {"mesh": {"pp": 2}, "modules": {"head": {"on": "pp[1]"}}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)
        self.p2 = nn.Parameter(torch.randn(6))

    def forward(self, x, ids, labels):
        v2, v3 = x * self.p1, x * self.p2
        with torch.no_grad():
            v4 = v2.view(v2.shape[0], -1)
            v4.neg_()
            v3.mul_(2)
        return {"loss": (self.head(v2) + v3).square().mean()}
