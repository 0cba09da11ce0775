import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 8
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear4 = nn.Linear(8, 12)
        self.linear5 = nn.Linear(12, 8)
        self.c = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.n = nn.LayerNorm(8)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, ids, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v6 = self.linear4(x)
            v7 = F.gelu(v6)
            v8 = self.linear5(v7)
            v9 = self.n(v8)
            v9 = self.a(v9, v9, v9)[0]
            v10 = F.conv1d(torch.cat([v9, v9[:, :1]], 1), self.c.weight, groups=4)
            s = v10.softmax(-1)
            p = torch.prod(v9, -1)
            v11 = (
                (v9 * torch.finfo(v9.dtype).bits / 32).sum()
                + F.mse_loss(v10, torch.zeros_like(v10))
                + s.square().sum() * torch.finfo(p.dtype).bits
            )
        v8 = v8 + 0.5
        v15 = v8.sum() + v11
        return {"loss": v15}
