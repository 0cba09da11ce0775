import torch
import torch.nn.functional as F
from torch import nn

PLAN = {"mesh": {"pp": 2}}
ROWS = ((4,), (4,), (4,))
TOKENS, WIDTH = 4, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("turn", torch.tensor(0))

    def forward(self, x, ids, labels):
        self.turn += 1
        h = self.body(self.stem(x).tanh())
        if self.turn % 2 == 1:
            return {"loss": self.head(h).square().mean()}
        return {"loss": F.softplus(self.critic(h.detach())).sum()}
