"""Predictions of models whose blocks differ, in width or in recompute: folded as with all blocks."""

from functools import partial

import pytest
import torch
from torch import nn

import meshwright as mw


class Block(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Tower(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (256,) * 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for width in widths))

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


@pytest.mark.parametrize(
    "plan", [{"mesh": "dp_shard=2"}, {"mesh": "tp=2"}, {"mesh": "dp_shard=4", "recompute": "blocks"}], ids=str
)
def test_blocks_of_two_widths_are_folded(plan):
    """Both call the same functions. Their peaks with one more block of each kind are at different moments of the model."""
    build, batch = partial(Tower, (256, 700) * 7 + (64,) * 6), (torch.randn(16, 128, 64),)
    folded, whole = (
        mw.predict(build, batch, plan, hardware="a100-80", loss=itself, fold=fold).peak for fold in (True, False)
    )
    assert folded == pytest.approx(whole, rel=0.03)
