import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(4, 12, bias=False)

    def forward(self, x, ids, labels):
        v4 = self.linear3(x)
        v5 = v4.square().mean(-1)[labels >= 0].mean()
        return {"loss": v5}
