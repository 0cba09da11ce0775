from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "schedule": "interleaved"}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstmcell2 = nn.LSTMCell(8, 5)
        self.lstmcell2.register_full_backward_pre_hook(lambda m, of: tuple(None if g is None else g * 0.7 for g in of))
        self.query19 = nn.Linear(5, 6)
        self.values22 = nn.Linear(5, 6)
        self.conv2d31 = nn.Conv2d(1, 4, 3, padding=1)
        self.p33 = nn.Parameter(torch.randn(4) * 0.5)
        self.conv2d35 = nn.Conv2d(4, 1, 3, padding=1)
        self.head38 = nn.Linear(5, 11, bias=False)

    def forward(self, x, ids, labels):
        n1 = [(x.new_zeros(x.shape[0], 5),) * 2]
        for t in x.unbind(1):
            n1.append(self.lstmcell2(t, n1[-1]))
        v3 = torch.stack([h for h, c in n1[1:]], 1)
        v39 = self.head38(v3)
        return {"loss": F.cross_entropy(v39.flatten(0, 1), labels.flatten())}
