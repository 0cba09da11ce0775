from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(4, 6, bias=False)
        self.recurrent8 = nn.GRU(6, 4, batch_first=True)

    def forward(self, x, ids, labels):
        v3 = self.linear2(x)
        v9 = self.recurrent8(v3)[0]
        v11 = v3.sum()
        return {"loss": v11}
