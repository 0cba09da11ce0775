import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_replicate": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 5, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(4, 8, bias=False)

    def forward(self, x, ids, labels):
        v3 = self.linear2(x)
        v9 = x.square().mean(-1).masked_select(labels >= 0).mean()
        v10 = v3.square().mean()
        v11 = v9 + 0.5 * v10
        return {"loss": v11}
