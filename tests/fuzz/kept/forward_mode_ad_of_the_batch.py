from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 3, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear3 = nn.Linear(4, 4)

    def forward(self, x, ids, labels):
        n2 = [x.new_zeros(x.shape[0], 4)]
        for t, m in zip(x.unbind(1), (ids > 3).unbind(1)):
            n2.append(torch.where(m[:, None], torch.tanh(self.linear3(n2[-1]) + t), n2[-1]))
        v4 = torch.stack(n2[1:], 1)
        v9 = torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1]
        v10 = v4.sum()
        return {"loss": v10}
