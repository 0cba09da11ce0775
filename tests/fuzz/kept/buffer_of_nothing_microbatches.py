import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b1", torch.tensor(0.5))
        self.linear7 = nn.Linear(2, 4, bias=False)

    def forward(self, x, ids, labels):
        self.b1.add_(1)
        v6 = x[:, :, [0, 7]]
        v8 = self.linear7(v6)
        v9 = v8.sum()
        return {"loss": v9}
