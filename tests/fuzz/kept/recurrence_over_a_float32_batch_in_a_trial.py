from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 3}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 8
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent1 = nn.GRU(8, 3, batch_first=True)

    def forward(self, x, ids, labels):
        v2 = self.recurrent1(x)[0]
        v19 = v2.square().mean()
        return {"loss": v19}
