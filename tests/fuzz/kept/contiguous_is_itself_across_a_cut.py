import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table3 = nn.Embedding(11, 4)
        self.head5 = nn.Linear(4, 11, bias=False)
        self.head5.weight = self.table3.weight

    def forward(self, x, ids, labels):
        v4 = self.table3(ids)
        v6 = self.head5(v4)
        v7 = v6.contiguous()
        v7.sub_(0.3).mul_(2)
        v12 = v6.square().sum() * 0.05
        return {"loss": v12}
