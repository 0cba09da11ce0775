import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear8 = nn.Linear(1, 4)

    def forward(self, x, ids, labels):
        v2 = x.square().sum(2, keepdim=True).add(1).sqrt()
        v3 = torch.func.grad(lambda t: t.tanh().square().sum())(x)
        v10 = self.linear8(v2)
        v15 = v10.sum()
        return {"loss": v15}
