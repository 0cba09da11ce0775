# wrong: parameters
# parameters of step 0: frozen24.weight: [0.0490549, -0.127171, 0.197345, 0.265682], not [-0.0427905, -0.208046, -0.206951, -0.168709] (off by 4.9e-01)
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "tp": 2}, "parameters": {"p28": {"tp": "shard:0"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(8))
        self.conv3 = nn.Conv1d(8, 12, 1)
        self.prelu5 = nn.PReLU(5)
        self.p8 = nn.Parameter(torch.tensor(0.7))
        self.conv1d10 = nn.Conv1d(5, 4, 3, stride=2, padding=1)
        self.upconv13 = nn.ConvTranspose1d(4, 5, 4, stride=2, padding=1)
        self.conv2d16 = nn.Conv2d(1, 4, 3, padding=1)
        self.p18 = nn.Parameter(torch.randn(4) * 0.5)
        self.conv2d20 = nn.Conv2d(4, 1, 3, padding=1)
        self.linear22 = nn.Linear(8, 2)
        self.frozen24 = nn.Linear(8, 2).requires_grad_(False)
        self.p28 = nn.Parameter(torch.randn(6, 2) * 0.5)

    def forward(self, x, ids, labels):
        v2 = x * 1.0
        if int(ids[0, 0]) % 2:
            v2 = v2 * self.p1
        v4 = self.conv3(v2.mT).mT
        v6 = self.prelu5(x)
        with torch.no_grad():
            v7 = F.softplus(v6)
            v9 = torch.maximum(v6, self.p8)
        n11 = self.conv1d10(v9)
        n12 = {"low": n11, "high": v9}
        n14 = self.upconv13(n12["low"])
        v15 = torch.cat([n14, n12["high"]], -1)
        n17 = self.conv2d16(v15.unsqueeze(1))
        n19 = F.group_norm(n17, 2, self.p18)
        v21 = self.conv2d20(F.relu(n19, inplace=True)).squeeze(1) + v15
        n23 = self.linear22
        n25 = self.frozen24
        n26 = n23(v9) * n25(v9).sigmoid()
        n25.weight.data = 0.9 * n25.weight.data + 0.1 * n23.weight.data
        v27 = n26 * 1.0
        n29 = self.p28
        v30 = F.linear(v27, n29[:2]) * 0.3 + F.linear(v27, n29[2 : 2 * 2]).sigmoid() * n29[-1]
        v31 = F.cross_entropy(v15.flatten(0, 1), labels.flatten(), reduction="sum") * 0.1
        return {"loss": v31}
