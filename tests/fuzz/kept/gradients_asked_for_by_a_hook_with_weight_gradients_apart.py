from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "schedule": "zero_bubble", "microbatches": 2}
ROWS = ((4, 4), (4,))
TOKENS, WIDTH = 5, 4


class Model(nn.Module):
    """A fixed point, differentiated by solving for it in a hook."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, ids, labels):
        z = torch.tanh(self.inner(x)) + x
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            again = torch.tanh(self.inner(start))
            z.register_hook(lambda g: g + torch.autograd.grad(again, start, g, retain_graph=True)[0])
        return {"loss": self.last(z).square().mean()}
