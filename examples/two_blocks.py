"""DDP for one block and FSDP for another, on the same ranks; and data mixed with tensor parallelism.

Answers questions 2 and 3 of the thread on two concurrent blocks, about its model ``Foo``, which is not edited.
``block_b`` is the larger, so its weights are sharded, while ``block_a`` is replicated; then the layers of both are cut
over tensor parallel ranks as well. Question 1, blocks at the same time on ranks of their own, is that of branches.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.draw.console import console
from meshwright.draw.terminal import render


class Foo(nn.Module):  # as asked
    def __init__(self) -> None:
        super().__init__()
        self.block_a = nn.Linear(256, 32)
        self.block_b = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x_a = self.block_a(x)
        x_b = self.block_b(x)
        return x_a + x_b


PLANS = {
    "block_a DDP, block_b FSDP": {
        "mesh": {"dp_shard": 4},
        "modules": {"block_a": {"dp": "replicate"}, "block_b": {"dp": "shard"}},
    },
    "data × tensor parallel": {"mesh": {"dp_shard": 2, "tp": 2}},
    "both": {
        "mesh": {"dp_shard": 2, "tp": 2},
        "modules": {"block_a": {"dp": "replicate"}, "block_b": {"dp": "shard"}},
    },
}


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def main() -> None:
    batch, show = {"x": torch.randn(8, 256)}, console().print
    with mw.local_workers(4) as workers:
        for title, plan in PLANS.items():
            shards = mw.shard_map(mw.make_recipe(Foo, plan, batch, loss))
            show(f"\n[bold]{title}[/]", render(shards, parameter="*.weight"), sep="\n")
            held = {name: len(shards.held_by(name)) for name in shards.parameters}
            print(f"distinct slices: block_a {held['block_a.weight']}, block_b {held['block_b.0.weight']}")
            report = mw.check(Foo, batch, plan, loss=loss, workers=workers)
            print(report)
            assert report


if __name__ == "__main__":
    main()
