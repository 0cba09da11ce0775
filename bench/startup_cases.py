"""What bench/startup.py runs in processes of its own.

    python bench/startup_cases.py nothing | unet | lengths

nothing    imports what planning takes
unet       the same, and plans a U-Net of 953 events, whose blocks are of many widths: each time that something is learnt
           of their parameters, the forward is followed again
lengths    CPU milliseconds of a step whose length was met before, and of one whose length is new, over pp=2 and over data
           ranks; and how many forwards were recorded for these
"""

from __future__ import annotations

import sys
import time
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw


class Residual(nn.Module):
    """Two convolutions, told the time."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, width), nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Attention over the pixels and a gated MLP, both of fused projections."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (z.view(b, h * w, self.heads, -1).transpose(1, 2) for z in self.qkv(y).chunk(3, -1))
        y = y + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c))
        gate, up = self.up(self.norm2(y)).chunk(2, -1)
        y = y + self.down(F.gelu(gate) * up)
        return x + y.transpose(1, 2).reshape(b, c, h, w)


class Level(nn.Module):
    def __init__(self, width: int, out: int, time: int, attention: bool) -> None:
        super().__init__()
        self.residual, self.attention = Residual(width, out, time), Attention(out) if attention else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.attention(self.residual(x, time))


class UNet(nn.Module):
    """A denoiser as diffusion models have it: down, through, and up again beside what was kept on the way down."""

    def __init__(self, width: int = 32, factors: tuple[int, ...] = (1, 2, 4, 4), each: int = 3) -> None:
        super().__init__()
        self.width, time, now, kept = width, 4 * width, width, [width]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.down, self.up = nn.Conv2d(4, width, 3, padding=1), nn.ModuleList(), nn.ModuleList()
        for i, factor in enumerate(factors):
            for _ in range(each):
                self.down.append(Level(now, factor * width, time, i > 0))
                kept.append(now := factor * width)
            if i < len(factors) - 1:
                self.down.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                kept.append(now)
        self.middle = nn.ModuleList([Level(now, now, time, True), Residual(now, now, time)])
        for i, factor in reversed(list(enumerate(factors))):
            for _ in range(each + 1):
                self.up.append(Level(now + kept.pop(), factor * width, time, i > 0))
                now = factor * width
            if i:
                self.up.append(nn.Conv2d(now, now, 3, padding=1))
        self.last = nn.Sequential(nn.GroupNorm(8, now), nn.SiLU(), nn.Conv2d(now, 4, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        angle = t[:, None] * torch.exp(torch.arange(self.width // 2, dtype=x.dtype) * -0.1)
        time, x = self.time(torch.cat([angle.sin(), angle.cos()], -1)), self.first(x)
        kept = [x]
        for block in self.down:
            kept.append(x := block(x, time) if isinstance(block, Level) else block(x))
        for block in self.middle:
            x = block(x, time)
        for block in self.up:
            if isinstance(block, Level):
                x = block(torch.cat([x, kept.pop()], 1), time)
            else:
                x = block(F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.last(x), noise)


def nothing() -> None:
    _ = mw.make_recipe


def unet() -> None:
    x = torch.randn(8, 4, 64, 64)
    mw.make_recipe(UNet, "pp=8,tp=2", {"x": x, "t": torch.rand(8), "noise": x}, loss=lambda loss: loss)


VOCAB, WIDTH, ROWS = 64, 64, 4
LENGTHS = (32, 96, 64, *range(34, 64, 2))  # from the fourth on each is between two that were met
MESHES = ("pp=2", "dp_shard=2")


class Decoder(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(blocks)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def steps(mesh: str) -> tuple[float, float, int]:
    """CPU milliseconds of a step of a known length, and of a new one (medians); forwards that were recorded for the new."""
    torch.set_num_threads(1)
    job = mw.parallelize(Decoder, {"mesh": mesh, "microbatches": 2}, batch=_batch(LENGTHS[0]))
    recorded = 0
    if job.pipeline is not None:
        replanner = job.pipeline.programs.replanner
        make = replanner.graph

        def counted(*args: object, **named: object) -> object:
            nonlocal recorded
            recorded += 1
            return make(*args, **named)

        replanner.graph = counted
    for length in LENGTHS[:3]:
        job.step(_batch(length))
        job.step(_batch(length))
    known, new, recorded = [], [], 0
    for length in LENGTHS[3:]:
        new.append(_timed(job, length))
        known.append(_timed(job, length))
    return 1e3 * median(known), 1e3 * median(new), recorded


def _timed(job: mw.Job, length: int) -> float:
    batch, begin = _batch(length), time.process_time()
    job.step(batch)
    return time.process_time() - begin


def _batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(length))
    return {"ids": ids, "labels": ids}


def lengths() -> None:
    with mw.local_workers(2) as workers:
        for mesh in MESHES:
            known, new, recorded = workers.run(steps, mesh)[0]
            print(f"{mesh:12} known length {known:6.1f} ms, new length {new:6.1f} ms, {recorded} forwards recorded for "
                  f"{len(LENGTHS) - 3} new lengths")  # fmt: skip


if __name__ == "__main__":
    {"nothing": nothing, "unet": unet, "lengths": lengths}[sys.argv[1]]()
