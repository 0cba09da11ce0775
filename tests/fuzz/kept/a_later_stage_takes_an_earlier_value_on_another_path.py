import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6
PRECISE = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p9 = nn.Parameter(torch.randn(6) * 0.5)
        self.linear11 = nn.Linear(6, 6)
        self.head26 = nn.Linear(2, 11, bias=False)

    def forward(self, x, ids, labels):
        v2 = x.index_select(2, torch.tensor([2, 0]))
        v10 = x + (x - x).detach() + self.p9
        n12 = self.linear11(v10)
        n13 = n12 if bool((v10 != v10).any()) else v10
        v14 = n13 + 0.5 * n12
        v27 = self.head26(v2)
        v28 = F.cross_entropy(
            v27.flatten(0, 1), labels.flatten(), weight=torch.linspace(0.5, 2, v27.shape[-1]).to(v27.dtype)
        )
        return {"loss": v28}
