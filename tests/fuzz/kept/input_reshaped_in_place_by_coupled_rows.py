import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b1", torch.zeros(4))
        self.head10 = nn.Linear(4, 11, bias=False)

    def forward(self, x, ids, labels):
        self.b1 = 0.9 * self.b1 + 0.1 * x.detach().mean((0, 1))
        x.unsqueeze_(1)
        v11 = self.head10(x)
        return {"loss": v11.sum()}
