import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAN = {"mesh": {"pp": 2}, "microbatches": 3, "recompute": "blocks"}
ROWS = ((4,),)
TOKENS, WIDTH = 4, 6


class Decides(nn.Module):
    def __init__(self, inner, sign):
        super().__init__()
        self.inner, self.sign = inner, sign

    def forward(self, h, other):
        made = self.inner(h)
        if (h.square().mean() * self.sign >= 0).item():
            return made, other
        return other, made


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(6, 4, bias=False)
        self.linear4 = nn.Linear(4, 6)

    def forward(self, h):
        v1 = h * 1.0
        v3 = self.linear2(v1)
        return h + self.linear4(v3)


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b2", torch.tensor(0.5))

    def forward(self, h):
        v1 = h * 1.0
        self.b2 += 0.5
        v3 = torch.vmap(lambda t: t * (self.b2 + 1))(v1)
        return h + v3


class Block3(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b3", torch.zeros(7))
        self.linear7 = nn.Linear(7, 6)

    def forward(self, h):
        v1 = h * 1.0
        self.kept0 = h
        v2 = v1[:, :, 1:]
        v2.copy_(v2)
        self.b3 += 0.5
        v4 = v2 * (self.b3 + 1)
        v5 = v1 + self.kept0
        v6 = v2.take_along_dim(v2.argsort(1), 1)
        seen = v2.square().mean().item()
        v8 = self.linear7(v2)
        return v5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = Decides(Block1(), -1)
        self.attention4 = nn.MultiheadAttention(6, 2, batch_first=True)
        self.p6 = nn.Parameter(torch.randn(6, 4, 1) * 0.4)
        self.linear9 = nn.Linear(6, 8)
        self.frozen11 = nn.Linear(6, 6).requires_grad_(False)
        self.linear13 = nn.Linear(6, 6)
        self.recurrent17 = nn.LSTM(6, 3, batch_first=True)
        self.linear19 = nn.Linear(8, 3)
        self.p21 = nn.Parameter(torch.randn(3, 8, 4) * 0.5)
        self.left23 = Decides(Block2(), 1)
        self.right24 = Decides(Block3(), 1)
        self.linear30 = nn.Linear(3, 4)
        self.frozen32 = nn.Linear(3, 4).requires_grad_(False)
        self.head36 = nn.Linear(8, 11, bias=False)

    def forward(self, x, ids, labels, carried):
        n2 = self.block1(x, x)
        v3 = n2[1] * 1.0
        v5 = self.attention4(x, x, x, need_weights=False)[0]
        v7 = F.conv1d(v5, self.p6, padding=0, groups=1)
        n8 = carried.setdefault("sum", torch.zeros_like(v5))
        n8.add_(v5.detach())
        v10 = self.linear9(v5 - 0.1 * n8)
        n12 = self.frozen11
        n14 = self.linear13
        if self.training:
            n12.weight.detach().lerp_(n14.weight.detach(), 0.1)
        n15 = n14(v3)
        v16 = n15 if self.training else n12(n15)
        v18 = self.recurrent17(x)[0]
        n20 = F.one_hot(self.linear19(v10).argmax(-1), 3).to(v10.dtype)
        v22 = torch.einsum("btl,bte,elk->btk", v10, n20, self.p21 * 0.4)
        v10.sub_(0.3).mul_(2)
        n25 = self.left23(v10, v10)
        n26 = self.right24(v10, v10)
        v27 = n25[0] * 1.0
        v28 = n26[1] * 1.0
        v29 = v27 - 0.5 * v28
        n31 = self.linear30
        n33 = self.frozen32
        n34 = n31(v18) * n33(v18).sigmoid()
        n33.weight.data = 0.9 * n33.weight.data + 0.1 * n31.weight.data
        v35 = n34 * 1.0
        v37 = self.head36(v28)
        v38 = F.cross_entropy(v37.flatten(0, 1), labels.flatten(), reduction="sum") * 0.1
        v39 = v29.square().mean()
        v40 = v35.square().mean()
        v41 = F.l1_loss(v29.mean(0), torch.zeros_like(v29[0]))
        v42 = v38 + 0.5 * v41
        return {"loss": v42}
