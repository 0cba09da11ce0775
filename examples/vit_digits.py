"""A Vision Transformer on real images, data × tensor parallel: the handwritten digits that come with scikit-learn.

Answers the slides on two-dimensional parallelism, which train a ViT with tensor parallelism within a host and data
parallelism across hosts. Here 2 × 2 local processes train a small one on 8 × 8 images; its class knows of none of that.
Needs the extra ``vision``: ``pip install meshwright[vision]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import meshwright as mw
from meshwright.train import loop
from meshwright.workers.pool import report

PLAN = {"mesh": {"dp_shard": 2, "tp": 2}}  # the outer axis is data: across hosts; the inner one tensor: within a host
STEPS, ROWS, WIDTH, HEADS, BLOCKS, TEST = 100, 64, 64, 4, 2, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (t.view(rows, tokens, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches of 2 × 2 pixels, a class token, learnt positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.3 * torch.randn(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        logits = self.head(self.norm(self.blocks(x)[:, 0]))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def digits() -> dict[str, Tensor]:
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return {"images": images, "labels": torch.tensor(found.target)}


def train(steps: int) -> tuple[float, int]:
    """Runs on every rank: how many of its test images it recognises, and which data rank it is."""
    data = digits()
    order = torch.randperm(len(data["labels"]), generator=torch.Generator().manual_seed(0))
    fit, test = ({k: v[rows] for k, v in data.items()} for rows in (order[TEST:], order[:TEST]))
    job = mw.parallelize(ViT, PLAN, batch={k: v[:ROWS] for k, v in fit.items()})
    loop.train(job, fit, steps=steps, global_batch=ROWS, lr=2e-3, on_step=report)
    with torch.no_grad():
        right = sum(
            (job(**b)["logits"].argmax(-1) == b["labels"]).sum() for b in job.batches(test, TEST, shuffle=False)
        )
    return int(right), job.recipe.mesh.data_index(job.rank)


def main(steps: int = STEPS, least: float = 0.9) -> float:
    def told(now: loop.Progress) -> None:
        if now.step in (1, steps) or now.step % 20 == 0:
            print(f"step {now.step:3}  loss {now.loss:.3f}  {now.rate:.0f} images/s")

    with mw.local_workers(4) as workers:
        found = workers.run(train, steps, ranks=4, on_report=told)
        accuracy = sum({piece: right for right, piece in found}.values()) / TEST  # each data rank has its rows
        print(f"{accuracy:.1%} of {TEST} images that it never saw are recognised")
        verdict = mw.check(ViT, {k: v[:8] for k, v in digits().items()}, PLAN, workers=workers)
        print(verdict)
    assert accuracy > least and verdict
    return accuracy


if __name__ == "__main__":
    main()
