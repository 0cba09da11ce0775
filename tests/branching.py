"""Models with parts that can run at the same time, as people write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

DIM, ROWS = 24, 12


def rows(count: int = ROWS, tokens: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shape = (count, tokens, DIM) if tokens else (count, DIM)
    return {"x": torch.randn(shape, generator=draw), "y": torch.randn((count, 5), generator=draw)}


class MLP(nn.Module):
    def __init__(self, hidden: int = 32, dim: int = DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Toy(nn.Module):
    """The forum's: two blocks of one input, their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.block_a, self.block_b = MLP(128), MLP(64)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        x_a = self.block_a(x)
        x_b = self.block_b(x)
        out = self.head(x_a + x_b)
        return {"loss": F.mse_loss(out, y), "out": out}


class CachingMLP(MLP):
    """Leaves what it computes in a dict that it is handed."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        cache.hidden[len(cache.hidden)] = hidden = torch.relu(self.up(x))
        return self.down(hidden)


class Cached(Toy):
    """Two blocks that leave values in one object, which is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.block_a, self.block_b = CachingMLP(128), CachingMLP(64)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        cache = Hidden()
        x = self.stem(x)
        out = self.head(self.block_a(x, cache=cache) + self.block_b(x, cache=cache))
        loss = F.mse_loss(out, y) + cache.hidden[0].mean() * len(cache.hidden)
        return {"loss": loss, "out": out}


class Hidden:
    """What blocks of a forward left."""

    def __init__(self) -> None:
        self.hidden: dict[int, Tensor] = {}


class NoisyMLP(MLP):
    """Draws from a generator that others may draw from too; ``by_values``: as many numbers as its values say."""

    def __init__(self, own: torch.Generator, *, by_values: bool = False) -> None:
        super().__init__()
        self.own, self.by_values = own, by_values

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.by_values:
            return h * torch.poisson(torch.exp(h.detach()), generator=self.own)
        return h + torch.randn(h.shape, generator=self.own, dtype=h.dtype)


class NoisyToy(Toy):
    """The forum's, of which one block draws random numbers or both do, from one generator."""

    def __init__(self, which: str, *, by_values: bool = False) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.block_a = NoisyMLP(own, by_values=by_values)
        if which == "both":
            self.block_b = NoisyMLP(own, by_values=by_values)


class ProjectedTowers(nn.Module):
    """Two towers, each with a projection that is called after the tower, and before the other tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower_a, self.tower_b = MLP(128), MLP(64)
        self.project_a, self.project_b = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 5)), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a = self.project_a(self.tower_a(x))
        b = self.project_b(self.tower_b(x * 2))
        return {"loss": F.mse_loss(a * b, y), "out": a + b}


class Averaging(MLP):
    """Takes away the average of what it took before, and keeps the new one in a buffer, written in place or assigned."""

    def __init__(self, hidden: int, *, assigned: bool) -> None:
        super().__init__(hidden)
        self.assigned = assigned
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.assigned:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        self.count += 1
        return super().forward(x - self.mean) * (1 + self.count / 10)


class Averages(Toy):
    """Branches with buffers that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.block_a, self.block_b = Averaging(64, assigned=False), Averaging(128, assigned=True)


class Three(Toy):
    """Three branches, joined by concatenation; one of them is the input of a plain function first."""

    def __init__(self) -> None:
        super().__init__()
        self.block_c, self.mix = MLP(7), nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        parts = [self.block_a(x), self.block_b(x).tanh(), self.block_c(x * 2)]
        return {"loss": F.mse_loss(self.head(self.mix(torch.cat(parts, -1))), y)}


class Residual(nn.Module):
    """Attention and MLP side by side, as in GPT-J: ``x + a(x)``, then ``+ b(x)``; in repeated blocks."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(DIM), heads
        self.attn, self.mlp = Attention(heads), MLP(96)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attn(normed)
        return x + self.mlp(normed)


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, DIM))


class Parallel(nn.Module):
    """A stack of them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Residual() for _ in range(depth)), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(self.head(x.mean(1)), y)}


class Tracks(nn.Module):
    """Two tracks that exchange what they have after each block, as in the Evoformer."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.left = nn.ModuleList(MLP() for _ in range(depth))
        self.right = nn.ModuleList(MLP(48) for _ in range(depth))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = x, x * 2
        for left, right in zip(self.left, self.right, strict=True):
            da, db = left(a), right(b)
            a, b = a + da + 0.5 * db, b + db
        return {"loss": F.mse_loss(self.head(a * b), y)}


class Pieced(nn.Module):
    """A branch's result put together in memory, slice by slice, by plain functions of the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.a, self.b = MLP(), MLP(48)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a, b = self.a(x), self.b(x)
        whole = b.new_empty(b.shape)
        whole[..., : DIM // 2].copy_(b[..., DIM // 2 :])
        whole[..., DIM // 2 :].copy_(b[..., : DIM // 2])
        return {"loss": F.mse_loss(self.head(a * whole), y)}


class Experts(nn.Module):
    """Each row's own expert: of some no row is, and of all none without values."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(MLP(16) for _ in range(3))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in F.one_hot(chosen, len(self.each)).sum(0).greater(0).nonzero()[:, 0]:
            if i == len(self.each):
                continue
            rows = (chosen == i).nonzero().flatten()
            out = out.index_add(0, rows, self.each[int(i)](x[rows]) * weights[rows])
        return out


class Chosen(nn.Module):
    """Experts beside a block that all rows go through, and nothing around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 3), nn.Linear(DIM, 5)
        self.experts, self.shared = Experts(), MLP()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        weights, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        out = self.experts(x, weights, chosen.flatten()) * self.shared(x)
        return {"loss": F.mse_loss(self.head(out), y)}


class HandedOn(nn.Module):
    """A parameter of the model's goes through a module of a branch, which gives it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Parameter(torch.randn(DIM)), MLP(), MLP(48)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        b = self.b(x)
        table = self.drop(self.table).to(b.device)
        a = self.a(x * table[:DIM].unsqueeze(0))
        return {"loss": F.mse_loss(self.head(a * b * table), y)}


class Mutual(Tracks):
    """Two tracks of which each takes of the other."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = x, x * 2
        for left, right in zip(self.left, self.right, strict=True):
            da, db = left(a), right(b)
            a, b = a + da + 0.5 * db, b + db + 0.5 * da
        return {"loss": F.mse_loss(self.head(a * b), y)}


class Staged(nn.Module):
    """Two branches of which each takes, on its way, what the other made on its own."""

    def __init__(self, block: Callable[[str], nn.Module] = lambda name: MLP()) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.left = nn.ModuleList(block(f"left{i}") for i in range(3))
        self.right = nn.ModuleList(block(f"right{i}") for i in range(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        first, second = self.left[0](x), self.right[0](x)
        third = self.left[1](first)
        fourth = self.right[1](second + first)
        fifth = self.left[2](third + second)
        return {"loss": F.mse_loss(self.head(fourth * fifth), y)}


class Counting(MLP):
    """What a row gives depends on how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.shape[0] / 8


class Counted(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.block_b = Counting()


class Asked(Toy):
    """The model asks what a branch gave for its rows, and numbers them."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        b = self.block_b(x)
        b = F.gelu(b).view(len(b), -1).reshape((b.shape[0], 4, -1)).flatten(1) * (b.shape[0] / 8)
        numbers = torch.arange(b.size(0), dtype=b.dtype)[:, None] / len(x)
        return {"loss": F.mse_loss(self.head(self.block_a(x) + b * numbers), y)}


class Masked(Toy):
    """A branch takes a table of positions, of as many rows as the batch may have."""

    def __init__(self) -> None:
        super().__init__()
        self.block_b = Mixing()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        out = self.block_a(x) + self.block_b(x, mask / mask.sum(-1, keepdim=True))
        return {"loss": F.mse_loss(self.head(out.mean(1)), y)}


class Mixing(MLP):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(mask @ x)


class Borrowed(Parallel):
    """After all its blocks the model uses a weight of one of their branches."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        weight = self.layers[0].mlp.up.weight
        return {"loss": F.mse_loss(self.head(F.linear(F.linear(x, weight), weight.T).mean(1)), y)}


class Off(Toy):
    """A dropout that is off gives what it takes: on a branch, of what the trunk made of two."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a, b = self.block_a(x), self.block_b(x)
        weights = self.drop((a * b).softmax(-1))
        return {"loss": F.mse_loss(self.head(weights * b + weights), y)}


class Residuals(Toy):
    """After two branches the trunk goes on, and adds to what one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        h, b = self.block_a(x), self.block_b(x)
        h = h * (b.sum(-1, keepdim=True) + self.layers[0](b))
        for layer in self.layers:
            h = h + layer(h).tanh()
        return {"loss": F.mse_loss(self.head(h), y)}


class Apart(nn.Module):
    """A block of the trunk that gives what a branch made, and no other rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(DIM, DIM), MLP(), MLP(48), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.a(x) * self.b(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Apart() for _ in range(3)), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": F.mse_loss(self.head(x), y)}


class Weighed(Toy):
    """Takes a tensor of the batch as of the type that it has; and the tensor itself too."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.stem(x)
        weights = y[:, :1].contiguous()
        weighed = weights.type_as(h)
        out = self.block_a(h * weighed) + self.block_b(h) * (1 - weights.exp())
        return {"loss": F.mse_loss(self.head(out), y)}


class Typed(Toy):
    """A branch's values have several types: what follows one in memory need not begin where its own type may."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a = self.block_a(x)
        positive, doubled = a.sum(-1, keepdim=True) > 0, a.double()
        b = self.block_b(x)
        out = b.where(positive, 2 * b) * doubled.to(b.dtype) + a
        return {"loss": F.mse_loss(self.head(out), y)}


class Overwritten(Toy):
    """Of two values that come together, backward needs one as it came, and the other is written to."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a = self.block_a(x)
        first, second = a.tanh(), a.sin()
        b = self.block_b(x)
        squared = first * first * b
        second.add_(b)
        return {"loss": F.mse_loss(self.head(squared + second), y)}


class PairAttention(nn.Module):
    """Attention over sequences, with a bias of pairs."""

    def __init__(self, dim: int, pair: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.bias, self.out = nn.Linear(pair, heads, bias=False), nn.Linear(dim, dim)

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.qkv(self.norm(m)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(z).movedim(-1, -3).unsqueeze(-4))
        return m + self.out(mixed.transpose(-3, -2).flatten(-2))


class OuterProduct(nn.Module):
    """What pairs get of sequences: their outer product's mean."""

    def __init__(self, dim: int, pair: int) -> None:
        super().__init__()
        self.sides, self.out = nn.Linear(dim, 6), nn.Linear(9, pair)

    def forward(self, m: Tensor) -> Tensor:
        a, b = self.sides(m).chunk(2, -1)
        return self.out(torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2) / m.shape[1])


class Triangle(nn.Module):
    """Triangle multiplication of pairs."""

    def __init__(self, pair: int) -> None:
        super().__init__()
        self.norm, self.sides, self.out = nn.LayerNorm(pair), nn.Linear(pair, 2 * pair), nn.Linear(pair, pair)

    def forward(self, z: Tensor) -> Tensor:
        a, b = self.sides(self.norm(z)).chunk(2, -1)
        return z + self.out(torch.einsum("bikc,bjkc->bijc", a, b))


class Evoformer(nn.Module):
    """Blocks of two tracks, of sequences and of pairs: the first takes of the second, and gives to it at a block's end."""

    def __init__(self, depth: int = 2, dim: int = 8, pair: int = 6) -> None:
        super().__init__()
        self.rows = nn.ModuleList(PairAttention(dim, pair) for _ in range(depth))
        self.outer = nn.ModuleList(OuterProduct(dim, pair) for _ in range(depth))
        self.triangles = nn.ModuleList(Triangle(pair) for _ in range(depth))

    def forward(self, m: Tensor, z: Tensor) -> dict[str, Tensor]:
        for rows, outer, triangle in zip(self.rows, self.outer, self.triangles, strict=True):
            m = rows(m, z)
            z = triangle(z) + outer(m)
        return {"loss": m.square().mean() + z.square().mean()}


def alignment() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"m": torch.randn((3, 4, 5, 8), generator=draw), "z": torch.randn((3, 5, 5, 6), generator=draw)}


class Inception(nn.Module):
    """Paths of several modules with plain functions between them; one has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 4, 1)
        self.reduce3, self.conv3 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.pool, self.project = nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(8, 2, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.stem(x))
        a = F.relu(self.one(x))
        b = F.relu(self.conv3(F.relu(self.reduce3(x))))
        c = F.relu(self.project(self.pool(x)))
        return {"loss": F.mse_loss(self.head(torch.cat([a, b, c], 1).mean((2, 3))), y)}


def images() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"x": torch.randn((8, 3, 6, 6), generator=draw), "y": torch.randn((8, 5), generator=draw)}


class Towers(nn.Module):
    """Two inputs, two towers with embeddings, norms and projections, and a loss that compares all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.text = nn.Embedding(50, DIM), MLP(40)
        self.image = nn.Sequential(nn.Linear(18, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.text_out, self.image_out = nn.Linear(DIM, 16, bias=False), nn.Linear(DIM, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor, pixels: Tensor) -> dict[str, Tensor]:
        t = self.words(ids)
        t = self.text(t).mean(1)
        t = self.text_out(t)
        v = self.image_out(self.image(pixels))
        t, v = t / t.norm(dim=-1, keepdim=True), v / v.norm(dim=-1, keepdim=True)
        logits = self.scale.exp() * v @ t.T
        target = torch.arange(len(ids))
        return {"loss": (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2}


def pairs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"ids": torch.randint(0, 50, (8, 7), generator=draw), "pixels": torch.randn((8, 18), generator=draw)}


class Siamese(nn.Module):
    """One module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = MLP(40), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a = self.tower(x)
        b = self.tower(x.flip(0))
        return {"loss": F.mse_loss(self.head(a * b), y)}


class Nested(nn.Module):
    """Branches within a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.other, self.head = nn.Linear(DIM, DIM), Inner(), MLP(50), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        return {"loss": F.mse_loss(self.head(self.inner(x) + self.other(x)), y)}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(DIM, DIM), MLP(), MLP(48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.left(x) - self.right(x) * x


class Several(nn.Module):
    """Several outputs, in a dict; one of them is not used, another has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Outputs(), MLP(), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = self.a(x), self.b(x)
        out = self.head(a["main"] * (a["mask"] + 1) + b)
        return {"loss": F.mse_loss(out, y) + 0.1 * a["aux"]}


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, 1), nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        main = self.one(x)
        return {
            "main": main, "aux": self.two(x).pow(2).mean(), "mask": main.detach() > 0, "unused": self.unused(x), "no": None
        }  # fmt: skip


class Late(nn.Module):
    """The trunk goes on between the branches; the second takes what it made there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.between, self.head = MLP(), MLP(48), nn.Linear(DIM, DIM), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a = self.a(x)
        t = self.between(x)
        b = self.b(t * x)
        return {"loss": F.mse_loss(self.head(a + b + t), y)}


class Frozen(Toy):
    """One branch is frozen, and so is what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.block_b.requires_grad_(False)
        self.stem.requires_grad_(False)


class Chain(nn.Module):
    """One after the other: not at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = MLP(), MLP(), nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.head(self.b(self.a(x))), y)}


class Dropped(nn.Module):
    """Dropout in the branches and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)),
            nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)),
        )
        self.after = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = self.a(x), self.b(x)
        out = self.after(a + b)
        return {"loss": out.pow(2).mean(), "a": a, "b": b, "out": out}


def beside(first: int, second: int, **meshes: Any) -> dict[str, Any]:
    """``block_a`` on the first ranks of tp, ``block_b`` on the others."""
    modules: dict[str, Any] = {"block_a": {"on": f"tp[0:{first}]"}, "block_b": {"on": f"tp[{first}:{first + second}]"}}
    for name, mesh in meshes.items():
        modules[f"block_{name}"]["mesh"] = mesh
    return {"mesh": {"tp": first + second}, "modules": modules}


def on(mesh: dict[str, int], **places: Any) -> dict[str, Any]:
    """A plan that places modules; ``__`` in a name is a dot."""
    return {"mesh": mesh, "modules": {name.replace("__", "."): {"on": place} for name, place in places.items()}}


class Graph(nn.Module):
    """A random graph of trunk and branch modules: forks, joins, unused outputs, frozen parameters, shared modules."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.branches, self.trunk = nn.ModuleList(), nn.ModuleList()
        self.program: list[tuple[str, int, list[int]]] = []
        self.slices = choose.choice([[1, 3], [2, 2], [1, 1, 2], [1, 2, 1], [3, 1], [1, 1, 1, 1]])
        self.on: list[int] = []
        values = 1
        for _ in range(choose.randint(4, 10)):
            kind = choose.choice(["branch", "branch", "branch", "branch", "trunk", "add", "mul", "detach", "tanh"])
            taken = [choose.randrange(max(0, values - 4), values) for _ in range(2 if kind in ("add", "mul") else 1)]
            which = -1
            if kind == "branch":
                if self.branches and choose.random() < 0.1:
                    which = choose.randrange(len(self.branches))  # called again
                else:
                    which = len(self.branches)
                    self.branches.append(choose.choice([MLP(choose.choice([3, 8, 16]), 6), nn.Linear(6, 6), nn.Tanh()]))
                    self.on.append(choose.randrange(len(self.slices)))
                    self.branches[-1].requires_grad_(choose.random() > 0.15)
            elif kind == "trunk":
                which = len(self.trunk)
                self.trunk.append(nn.Linear(6, 6))
                self.trunk[-1].requires_grad_(choose.random() > 0.2)
            self.program.append((kind, which, taken))
            values += 1
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.kept = sorted(choose.sample(range(values), min(values, choose.randint(1, 3))))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        values = [self.first(x)]
        for kind, which, taken in self.program:
            a = values[taken[0]]
            if kind == "branch":
                values.append(self.branches[which](a))
            elif kind == "trunk":
                values.append(self.trunk[which](a))
            elif kind in ("add", "mul"):
                values.append(a + values[taken[1]] if kind == "add" else a * values[taken[1]].tanh())
            else:
                values.append(a.detach() if kind == "detach" else a.tanh())
        out = self.head(sum(values[i].tanh() for i in self.kept))
        return {"loss": F.mse_loss(out, y)}

    def plan(self, data: bool) -> dict[str, Any]:
        """Its branches on slices of tp=4; ``data``: those of several ranks are data parallel within."""
        ends = [sum(self.slices[:i]) for i in range(len(self.slices) + 1)]
        modules: dict[str, Any] = {}
        for i, place in enumerate(self.on):
            modules[f"branches.{i}"] = {"on": f"tp[{ends[place]}:{ends[place + 1]}]"}
            if data and self.slices[place] > 1:
                modules[f"branches.{i}"]["mesh"] = {"dp_shard": self.slices[place]}
        return {"mesh": {"tp": 4}, "modules": modules}


class Contained(nn.Module):
    """The same as ``Toy``, written with a container."""

    def __init__(self, join: Any = "sum", dim: int = -1) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.both = mw.Branches({"a": MLP(128), "b": MLP(64)}, join, dim)
        self.head = nn.Linear(2 * DIM if join == "cat" else DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.both(self.stem(x))
        if isinstance(found, (tuple, dict)):
            found = sum(found.values() if isinstance(found, dict) else found)
        if self.both.join == "stack":
            found = found.prod(0)
        out = self.head(found)
        return {"loss": F.mse_loss(out, y), "out": out}


def product(results: list[Tensor]) -> Tensor:
    return results[0] * results[1]


class Stop(torch.autograd.Function):
    """A product of which the first factor gets no gradient: none, not zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, (gradient * x).flatten(0, -2).sum(0)


class StoppingMLP(MLP):
    """Gives no gradient to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Stop.apply(x, self.factor))


class Stopping(nn.Module):
    """Two blocks, of which one gives no gradient, or neither does, or what is made of them gives them none.

    Args:
        where: "a", "both" or "head".
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.stem, self.side, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.block_a = MLP() if where == "head" else StoppingMLP()
        self.block_b = StoppingMLP() if where == "both" else MLP(64)
        self.factor, self.where = nn.Parameter(torch.rand(DIM)), where

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a, b = self.block_a(self.side(x)), self.block_b(x)
        out = a + b
        if self.where == "head":
            out = Stop.apply(out, self.factor)
        return {"loss": F.mse_loss(self.head(out), y)}


class StoppingTracks(Tracks):
    """Two tracks that exchange, of which the last block of one gives nothing back.

    What the first block of the other has made for it alone gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__(2)
        self.left[1] = StoppingMLP()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        first, second = self.left[0](x), self.right[0](x * 2)
        third, fourth = self.left[1](second), self.right[1](first)
        return {"loss": F.mse_loss(self.head(third * fourth), y)}
