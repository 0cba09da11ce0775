from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 2}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 4, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head32 = nn.Linear(6, 11, bias=False)

    def forward(self, x, ids, labels):
        v33 = self.head32(x)
        v34 = F.nll_loss(v33.log_softmax(-1).flatten(0, 1), labels.flatten())
        return {"loss": v34}
