from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm7 = nn.GroupNorm(2, 6)

    def forward(self, x, ids, labels):
        v8 = self.norm7(x.transpose(1, 2)).transpose(1, 2)
        v9 = (x.tanh() * (labels >= 0)[..., None]).sum() / ((labels >= 0).sum() + 1)
        v10 = v8.square().mean()
        v12 = v10 / v10.detach()
        v13 = v9 + 0.5 * v12
        return {"loss": v13}
