from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query1 = nn.Linear(4, 12)
        self.key3 = nn.Linear(4, 12)
        self.values5 = nn.Linear(4, 12)
        self.out15 = nn.Linear(12, 4)

    def forward(self, x, ids, labels):
        v2 = self.query1(x)
        v4 = self.key3(x)
        v6 = self.values5(x)
        v7 = v2.reshape(*v2.shape[:2], 3, 4).permute(0, 2, 1, 3)
        v8 = v4.reshape(*v4.shape[:2], 3, 4).permute(0, 2, 1, 3)
        v10 = v7 @ v8.transpose(-2, -1) / 2.0
        n11 = torch.ones(4, 4, dtype=torch.bool).triu(1)
        v14 = v10.transpose(1, 2).contiguous().view(v10.shape[0], -1, 12)
        v16 = x + self.out15(v14)
        v2.masked_fill_(v2.detach() > 0.5, 0.1)
        v17 = F.cross_entropy(v6.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        v18 = (v16.tanh() * (labels >= 0)[..., None]).sum() / ((labels >= 0).sum() + 1)
        v19 = v17 + 0.5 * v18
        return {"loss": v19}
