"""A Vision Transformer of 60 and 120 billion parameters on 64 GPUs: FSDP alone beside FSDP × tensor parallel. No GPU is needed.

PyTorch's slides on two-dimensional parallelism (Liang, Wang, December 2022) claim: 60B trains 2.6 times as fast with both; 120B
runs out of memory with FSDP alone, and trains with both; a layer's peak memory is 1.3 times as high with FSDP alone at a batch
of 1024, and 2.4 times at 512. They state neither the hardware nor the model's shape nor the precision. Assumed here: 8 nodes of
8 A100 with 40 GB and a network of 400 Gbit/s a node (AWS p4d), a width of 10240 with 48 blocks (60B) or 96 (120B), images of
224 × 224 in patches of 14 × 14, bfloat16 with float32 parameters and AdamW, blocks recomputed, fused attention.

Under these assumptions both fit or not as claimed, and the ratios of memory are near; the claimed speed is not found: a device
sends as many bytes to other nodes with both as with FSDP alone, mostly beside its computation, and tp adds traffic in the node.

    python examples/vit_60b.py [--hardware a100-80] [--network ib-200] [--batch 1024]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile

PATCH, PATCHES = 3 * 14 * 14, 256  # numbers of a patch; patches of an image
WIDTH, HEADS, CLASSES = 10240, 80, 1000
DEPTHS = {"60B": 48, "120B": 96}
LAYOUTS = {"FSDP": {"dp_shard": 64}, "2-D": {"dp_shard": 8, "tp": 8}}
CLAIMED = {1024: 1.3, 512: 2.4}  # batch → peak memory of one layer, FSDP over 2-D


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    def __init__(self, depth: int, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, width)
        self.positions = nn.Parameter(torch.zeros(PATCHES, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """``images``: (rows, PATCHES, PATCH); ``labels``: (rows,). Returns the loss."""
        x = self.patches(images) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)


def predicted(
    build: Callable[[], nn.Module], layout: str, batch: int, profile: Profile, *, recompute: bool
) -> mw.Prediction:
    """A step of ``batch`` images over 64 GPUs."""
    plan = {"mesh": LAYOUTS[layout], "precision": "bfloat16", "recompute": "blocks" if recompute else "none"}
    if "tp" in LAYOUTS[layout]:
        plan["sequence_parallel"] = True
    rows = {"images": torch.zeros(batch, PATCHES, PATCH, device="meta"),
            "labels": torch.zeros(batch, dtype=torch.long, device="meta")}  # fmt: skip
    return mw.predict(build, rows, plan, hardware=profile, loss=lambda output: output)


def main(
    hardware: str = "a100-40", network: str = "efa-50", batch: int = 1024, *, width: int = WIDTH, heads: int = HEADS
) -> None:
    profile = read_profile(hardware, network=network)
    print(f"{batch} images a step, 64 {hardware}, {network}, width {width}\n")
    print(f"{'model':6} {'layout':6} {'a step':>9} {'peak':>10} {'of':>9}   fits")
    steps: dict[tuple[str, str], mw.Prediction] = {}
    for model, depth in DEPTHS.items():
        for layout in LAYOUTS:
            said = predicted(partial(Vit, depth, width, heads), layout, batch, profile, recompute=True)
            steps[model, layout] = said
            needs = said.device_bytes()[1] / 2**30
            print(f"{model:6} {layout:6} {said.seconds.seconds:7.2f} s {needs:6.1f} GiB {said.capacity / 2**30:5.1f} GiB"
                  f"   {'yes' if said.fits else 'no'}")  # fmt: skip
    print(f"\n{'':44} {'claimed':>9} {'predicted':>10}")
    faster = steps["60B", "FSDP"].seconds.seconds / steps["60B", "2-D"].seconds.seconds
    print(f"{'60B: how many times as fast with both':44} {2.6:9.1f} {faster:10.2f}")
    for layout, claim in (("FSDP", "no"), ("2-D", "yes")):
        fits = "yes" if steps["120B", layout].fits else "no"
        print(f"{f'120B, {layout}: fits':44} {claim:>9} {fits:>10}")
    for rows, claim in CLAIMED.items():
        one = {layout: predicted(partial(Vit, 1, width, heads), layout, rows, profile, recompute=False).peak
               for layout in LAYOUTS}  # fmt: skip
        told = f"one layer, batch {rows}: peak, FSDP over 2-D"
        print(f"{told:44} {claim:9.1f} {one['FSDP'] / one['2-D']:10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="a100-40", help="a profile")
    parser.add_argument("--network", default="efa-50", help="one of the profile's networks")
    parser.add_argument("--batch", type=int, default=1024, help="images of a step")
    given = parser.parse_args()
    main(given.hardware, given.network, given.batch)
