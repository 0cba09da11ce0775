import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x, ids, labels):
        x.mul_(2).unsqueeze_(1)
        return {"loss": self.last(self.first(x)).square().mean()}
