import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((5,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p5 = nn.Parameter(torch.randn(6, 5, 3) * 0.4)

    def forward(self, x, ids, labels):
        x.zero_()
        v6 = F.conv1d(x, self.p5, padding=1, groups=1)
        v7 = v6.sum()
        v8 = F.cross_entropy(x.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        v9 = v7 + 0.5 * v8
        return {"loss": v9}
