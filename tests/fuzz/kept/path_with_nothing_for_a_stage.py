import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((6,),)
TOKENS, WIDTH = 5, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(4))
        self.linear4 = nn.Linear(4, 3)
        self.head6 = nn.Linear(3, 11, bias=False)

    def forward(self, x, ids, labels):
        v2 = x * 1.0
        if bool((ids > 7).any()):
            v2 = v2 * self.p1
        v2.detach().add_(0.1)
        v3 = v2.square().mean()
        v5 = self.linear4(x)
        v7 = self.head6(v5)
        v8 = F.cross_entropy(v7.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": v8}
