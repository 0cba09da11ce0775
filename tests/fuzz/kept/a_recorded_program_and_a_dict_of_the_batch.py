from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4, 4), (4, 4))
TOKENS, WIDTH = 5, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query11 = nn.Linear(4, 8)

    def forward(self, x, ids, labels, carried):
        carried["last"] = x.detach().tanh()
        v12 = self.query11(x)
        v26 = v12.sum()
        return {"loss": v26}
