from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"dp_shard": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear4 = nn.Linear(5, 4)
        self.linear5 = nn.Linear(4, 5)
        self.linear9 = nn.Linear(5, 5)
        self.recurrent15 = nn.LSTM(5, 4, batch_first=True)
        self.linear18 = nn.Linear(5, 12, bias=False)

    def forward(self, x, ids, labels):
        v1 = torch.bmm(x, x.mT) * 0.1
        v6 = self.linear4(v1)
        v8 = v1 + self.linear5(v6)
        v11 = self.linear9(v1)
        v12 = torch.sin(v11)
        v11.register_hook(lambda g: None)
        v16 = self.recurrent15(v12)[0]
        v19 = self.linear18(v8)
        v20 = v19.square().mean(-1).masked_select(labels >= 0).mean()
        return {"loss": v20}
