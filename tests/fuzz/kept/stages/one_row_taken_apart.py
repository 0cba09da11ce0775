import torch
from torch import nn

PLAN = {"mesh": {"pp": 3}, "microbatches": 3}
ROWS = ((4,),)
TOKENS, WIDTH = 5, 6
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(5, 6)

    def forward(self, x, ids, labels):
        v1 = x[:, :, 0]
        v3 = self.linear2(v1)
        n6 = (t * 0.5 for t in v3.unbind(1))
        v9 = torch.stack(list(n6), 1)
        v17 = v3.mean() + v9.square().mean()
        return {"loss": v17}
