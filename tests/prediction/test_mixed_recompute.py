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


def test_forwards_of_both_kinds_are_told_apart():
    """They call the same functions, but one keeps what the other does not."""
    kept = {f"blocks.{i}": {"recompute": "none"} for i in (3, 7, 11, 15)}
    plan = {"mesh": "dp_shard=2", "recompute": "blocks", "modules": kept}
    batch = (torch.randn(16, 128, 64),)
    folded, whole = (
        mw.predict(Tower, batch, plan, hardware="a100-80", loss=itself, fold=fold).peak for fold in (True, False)
    )
    assert folded == pytest.approx(whole, rel=0.05)
