import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 1}
ROWS = ((4,), (4,))
TOKENS, WIDTH = 6, 8


class Block(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.most, self.scores = most, nn.Linear(8, 1)
        self.mlp = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, h, mask):
        h = h + self.mlp(h)
        if h.shape[1] <= self.most:
            return h, mask
        which = (self.scores(h)[..., 0] * 10).round().long().remainder(self.most)
        found = nn.utils.rnn.pad_sequence([torch.unique(w) for w in which], batch_first=True, padding_value=0)
        return h.gather(1, found[..., None].expand(-1, -1, 8)), found != 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(5), Block(3)])
        self.last = nn.Linear(8, 8)

    def forward(self, x, ids, labels):
        h, mask = self.first(x), x[..., 0] > -9
        for block in self.blocks:
            h, mask = block(h, mask)
            h = h * 1.5
        return {"loss": self.last(h * mask[..., None]).square().sum(1).mean()}
