import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"tp": 2}, "microbatches": 2, "modules": {"left1": {"on": "tp[0:1]"}, "right2": {"on": "tp[1:2]"}}}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 4


class Block0(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp2 = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0))

    def forward(self, h):
        v1 = h * 1.0
        n3 = self.mlp2
        n4 = n3(v1)
        v5 = torch.func.functional_call(n3, {n: p.detach() * 0.5 for n, p in n3.named_parameters()}, (n4,)) + v1
        v6 = torch.hypot(v5, h + 1)
        return v6


class Levelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - 0.5 * g.mean(0)


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.p3 = nn.Parameter(torch.tensor(0.7))

    def forward(self, h):
        v1 = h * 1.0
        v2 = Levelled.apply(h)
        v4 = v2 * self.p3
        return v4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left1 = Block0()
        self.right2 = Block2()
        self.embedding7 = nn.Embedding(8, 2)
        self.linear9 = nn.Linear(4, 4)
        self.frozen20 = nn.Linear(4, 4).requires_grad_(False)
        self.linear22 = nn.Linear(4, 4)
        self.linear26 = nn.Linear(4, 4)
        self.norm28 = nn.LayerNorm(4)

    def forward(self, x, ids, labels):
        v3 = self.left1(x)
        v4 = self.right2(x)
        v5 = v3 + v4
        n6 = torch.arange(v5.shape[1])
        n8 = self.embedding7(n6[:, None] - n6[None] + len(n6)).permute(2, 0, 1)
        n10 = self.linear9(v5).unflatten(-1, (2, 2)).transpose(1, 2)
        v11 = F.scaled_dot_product_attention(n10, n10, n10, attn_mask=n8).transpose(1, 2).flatten(2)
        v19 = x / (x.abs() + 1)
        n21 = self.frozen20
        n23 = self.linear22
        if self.training:
            n21.weight.detach().lerp_(n23.weight.detach(), 0.1)
        n24 = n23(v4)
        v25 = n24 if self.training else n21(n24)
        n27 = self.linear26
        n29 = self.norm28
        n30 = torch.nn.utils.parameters_to_vector(n27.parameters())
        v31 = F.linear(n29(v3), n30[: 4 * 4].view(4, 4), n30[4 * 4 :]) * 0.5
        v32 = v4.square().sum() * 0.05
        v33 = v31.square().mean()
        v34 = v25.square().mean()
        v35 = v33 / v33.item()
        v36 = v32 + 0.5 * v35
        return {"loss": v36}
