import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 3, 4
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p2 = nn.Parameter(torch.randn(3) * 0.5)

    def forward(self, x, ids, labels, carried):
        v3 = ids + ids[[-1, *range(ids.shape[0] - 1)]] * self.p2
        n4 = carried.setdefault("means", [])
        n4.append(x.detach().mean((1, 2)))
        n19 = carried.setdefault("sum", torch.zeros_like(ids))
        n19.add_(ids.detach())
        v22 = v3.sum()
        v23 = v3.square().mean()
        v24 = v22 + v23 * (v22 / v23).detach()
        return {"loss": v24}
