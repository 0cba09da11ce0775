"""Plans in which tp leaves some layers whole: tried where their collectives take longer than their products, and right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.hardware.profile import Curve, Link
from meshwright.hardware.reader import read_profile
from meshwright.prediction.predict import adamw_on
from meshwright.search.chains import chains_of
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.shardings import Shardings, may_gather_slowly
from meshwright.search.space import Sharding

SLOW = Link(4e-4, 1e9, Curve(((1.0, 1.0),)), 0.1, "a slow link")
DEVICE = replace(read_profile("v100"), name="a device with a slow link", devices_per_node=4096, node=SLOW)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A narrow attention, and a wide MLP whose layers are the block's own."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Tower(nn.Module):
    def __init__(self, width: int = 32, wide: int = 16384, depth: int = 4, words: int = 64) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.Sequential(*(Block(width, wide) for _ in range(depth)))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.table(ids))).flatten(0, 1), ids.flatten())


def ids(rows: int, length: int = 64) -> tuple[Tensor]:
    return (torch.arange(rows * length).remainder(64).view(rows, length),)


def itself(loss: Tensor) -> Tensor:
    return loss


ATTENTION, MLP, ENDS = ("blocks.*.attention",), ("blocks.*.up", "blocks.*.down"), ("table", "head")


def test_chains_are_what_runs_between_two_collectives() -> None:
    recipe = mw.make_recipe(partial(Tower, 32, 64, 2), {"mesh": "tp=2"}, ids(2), itself)
    chains = chains_of(recipe, [[f"blocks.{i}" for i in range(10)]])
    assert {chain.globs for chain in chains if not chain.in_blocks} == {ENDS}
    shares = {chain.globs: chain.share for chain in chains}
    assert set(shares) == {ATTENTION, MLP, ENDS}
    # of ten blocks: four weights of 32 × 32 and three biases; two of 32 × 64 and one bias; outside two of 64 × 32 and a bias
    sizes = [10 * (4 * 32 * 32 + 3 * 32), 10 * (2 * 32 * 64 + 64), 2 * 64 * 32 + 64]
    whole = sum(sizes) + 10 * (2 * 32 + 2 * 64)  # norms and the biases of row-parallel layers
    assert [shares[chain] for chain in (ATTENTION, MLP, ENDS)] == pytest.approx([size / whole for size in sizes])
    assert not chains_of(mw.make_recipe(partial(Tower, 32, 64, 2), {"mesh": "dp_shard=2"}, ids(2), itself), [])


def test_what_costs_more_to_exchange_than_to_compute_is_left_whole() -> None:
    found = mw.find_plans(
        Tower, ids(1, 1024), devices=2, hardware=DEVICE, loss=itself, options={"precision": "float32"}
    )
    (over_tp,) = [proposal for proposal in found.plans if proposal.estimate.candidate.tp == 2]
    whole = over_tp.estimate.candidate.whole
    assert {*ATTENTION} < {*whole} <= {*ATTENTION, *ENDS}, "the MLP is too wide"
    assert over_tp.plan.settings()["modules"] == {glob: {"tp": "replicate"} for glob in whole}
    predicted = mw.predict(Tower, ids(1, 1024), over_tp.plan, hardware=DEVICE, loss=itself).seconds.seconds
    assert over_tp.seconds == pytest.approx(predicted, rel=0.15)


@pytest.mark.proof
def test_nothing_is_left_whole_where_links_are_fast_or_the_plan_says_which() -> None:
    told: list[str] = []
    wide = Rehearsals(
        partial(Tower, 2048, 8192, words=32000), ids(8, 8192), {}, itself, adamw_on(DEVICE), 1.0, accelerator=True
    )
    fast = replace(read_profile("h100"), host_collective=0.0)
    shardings = Shardings(wide, fast, {}, 2, told.append)
    costs = shardings.plain([2])
    assert not shardings.others(costs, [2])
    late = replace(fast, node=replace(fast.node, latency=1e-2))
    assert may_gather_slowly(costs[Sharding(2)], late) and not may_gather_slowly(costs[Sharding(2)], fast)
    said = {"modules": {"head": {"tp": "column"}}}
    small = Rehearsals(partial(Tower, 32, 64), ids(8), said, itself, adamw_on(DEVICE), 1.0, accelerator=True)
    shardings = Shardings(small, DEVICE, said, 4, told.append)
    assert not any(sharding.whole for sharding in shardings.others(shardings.plain([2]), [2]))
    assert not any("whole" in text for text in told)


def test_no_other_sharding_is_tried_where_tp_cannot_be_the_fastest() -> None:
    told: list[str] = []
    mw.find_plans(partial(Tower, 32, 1024), ids(256), devices=2, hardware=DEVICE, loss=itself, tell=told.append)
    assert "rehearsing a few blocks with tp=2" in told and not any(
        "whole" in text or "without" in text for text in told
    )
