"""Predictions of models of which some blocks recompute and others keep their activations: folded as with all blocks."""

import pytest
import torch
from torch import nn

import meshwright as mw


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(16)))

    def forward(self, x):
        return self.blocks(x).square().mean()


def itself(loss):
    return loss


@pytest.mark.parametrize(
    ("mesh", "kept"),
    [
        (
            "dp_shard=2",
            (3, 7, 11, 15),
        ),  # in a forward both kinds call the same functions, but one keeps what the other does not
        (
            "dp_shard=4",
            (2, 5, 9, 13),
        ),  # two blocks that recompute end the model: the second of them needs more than the first
        ("tp=2", (15,)),  # in the backward, the first block needs no gradient of its inputs; the others do
    ],
)
def test_both_kinds_of_blocks_are_folded(mesh, kept):
    modules = {f"blocks.{i}": {"recompute": "none"} for i in kept}
    plan = {"mesh": mesh, "recompute": "blocks", "modules": modules}
    batch = (torch.randn(16, 128, 64),)
    folded, whole = (
        mw.predict(Tower, batch, plan, hardware="a100-80", loss=itself, fold=fold).peak for fold in (True, False)
    )
    assert folded == pytest.approx(whole, rel=0.001)
