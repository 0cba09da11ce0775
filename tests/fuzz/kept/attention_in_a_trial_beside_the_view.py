import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2, "tp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 3, 6
PRECISE = False


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.ones(6))
        self.attention5 = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, h):
        v1 = h * 1.0
        v3 = v1 * (self.b2 + 1)
        self.b2.lerp_(h.detach().mean((0, 1)), 0.1)
        v4 = v3 - v3.mean(1, keepdim=True)
        v6 = self.attention5(v4, v4, v4, need_weights=False)[0]
        v7 = v6.half()
        return h + v7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks4 = nn.ModuleList(Block0() for _ in range(2))
        self.head14 = nn.Linear(6, 11, bias=False)

    def forward(self, x, ids, labels):
        for block in self.blocks4:
            v5 = block(x)
        v15 = self.head14(x)
        v16 = F.cross_entropy(v15.flatten(0, 1), labels.flatten(), reduction="none").sum() / (labels >= 0).sum()
        return {"loss": v16}
