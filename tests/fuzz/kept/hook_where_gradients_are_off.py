import torch
import torch.nn.functional as F
from torch import nn

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm2 = nn.BatchNorm1d(4)
        self.norm4 = nn.BatchNorm1d(4)

    def forward(self, x, ids, labels):
        v3 = self.norm2(x.transpose(1, 2)).transpose(1, 2)
        with torch.no_grad():
            v5 = self.norm4(x.transpose(1, 2)).transpose(1, 2)
            v3.register_hook(lambda g: g * (g.abs() > 0.01))
        v18 = v5.sum()
        v21 = v3.square().mean()
        v22 = v18 + 0.5 * v21
        return {"loss": v22}
