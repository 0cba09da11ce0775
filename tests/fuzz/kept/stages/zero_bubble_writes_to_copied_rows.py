import torch
from torch import nn

PLAN = {"mesh": {"pp": 2}, "schedule": "zero_bubble"}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x, ids, labels):
        h = self.linear(x[:, :2])
        x.sub_(x)
        return {"loss": self.last(h.tanh()).square().mean() + h.square().mean()}
