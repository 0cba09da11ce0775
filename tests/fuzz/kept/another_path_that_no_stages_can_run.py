import torch
import torch.nn.functional as F
from torch import nn

PLAN = {"mesh": {"pp": 3}, "microbatches": 1}
ROWS = ((4,), (4,), (4,), (4,))
TOKENS, WIDTH = 3, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.randn(8))
        self.head15 = nn.Linear(4, 11, bias=False)

    def forward(self, x, ids, labels):
        v2 = x * 1.0
        if int(ids[0, 0]) % 2:
            v2 = v2 * self.p1
        n5 = v2[v2.sum(-1) > 0]
        v6 = v2 * (len(n5) / 8)
        v14 = x.chunk(2, 2)[0]
        v16 = self.head15(v14)
        v17 = F.cross_entropy(
            v16.flatten(0, 1), labels.flatten(), weight=torch.linspace(0.5, 2, v16.shape[-1]).to(v16.dtype)
        )
        return {"loss": v17}
