from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "dp_shard": 2}, "modules": {"grucell9": {"dp": "replicate"}}}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 3, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(3, 8)
        self.linear3 = nn.Linear(8, 3)
        self.grucell9 = nn.GRUCell(3, 3)
        self.linear11 = nn.Linear(6, 4)
        self.head13 = nn.Linear(4, 11, bias=False)

    def forward(self, x, ids, labels, carried):
        v1 = x.transpose(1, -1).contiguous()
        v4 = self.linear2(v1)
        v6 = self.linear3(v4)
        n8 = [v6.new_zeros(v6.shape[0], 3)]
        for t in v6.unbind(1):
            n8.append(self.grucell9(t, n8[-1]))
        v10 = torch.stack(n8[1:], 1)
        carried["count"] = carried.get("count", 0) + 1
        v12 = self.linear11(x) / carried["count"]
        torch.add(v12, v12, out=v12) if not torch.is_grad_enabled() else v12.sub_(v12)
        v14 = self.head13(v12)
        v15 = (
            -(v14.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * (labels >= 0)).sum()
            / (labels >= 0).sum()
        )
        return {"loss": v15}
