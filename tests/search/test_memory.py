"""The memory that a search estimates, against predictions: of models that recompute all of their blocks, some of them, or none."""

from itertools import product

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan
from meshwright.prediction.predict import adamw_on
from meshwright.search.estimate import Estimator
from meshwright.search.find import repeat_rows
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.sizes import DP_SHARD, MANY_ROWS
from meshwright.search.space import Candidate, Sharding
from meshwright.search.stages import StageCuts

GPU = read_profile("a100-80")
BLOCKS, PIPELINE_ROWS = 12, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))).sin())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(64, 64),
            nn.Sequential(*(Block() for _ in range(BLOCKS))),
            nn.Linear(64, 8),
        )

    def forward(self, x):
        return self.head(self.blocks(self.stem(x))).square().mean()


def itself(loss):
    return loss


@pytest.fixture(scope="module")
def estimator():
    batch = repeat_rows((torch.randn(1, 128, 64),), MANY_ROWS * DP_SHARD)
    rehearsals = Rehearsals(Tower, batch, {}, itself, adamw_on(GPU), 1.0, accelerator=True)
    costs = {sharding: rehearsals.layer_costs(sharding) for sharding in (Sharding(1), Sharding(2))}
    parts = rehearsals.stage_parts()
    cuts = StageCuts(parts, BLOCKS, PIPELINE_ROWS)
    return Estimator(GPU, costs, rehearsals.recomputed(), parts.received, 4, cuts=cuts), rehearsals.blocks


MESHES = [(1, 4, 1), (1, 8, 1), (1, 1, 2), (1, 2, 2), (4, 1, 1)]
QUICK = [((1, 4, 1), None, 2), ((1, 4, 1), 4, 32), ((1, 2, 2), 0, 32), ((4, 1, 1), 4, 2)]


def cases(every, quick):
    """All of them; the tests of a commit run the quick ones."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.proof) for case in every]


@pytest.mark.parametrize("mesh, saved, rows", cases([*product(MESHES, (None, 0, 4), (2, 32))], QUICK))
def test_the_estimate_is_that_of_a_prediction(estimator, mesh, saved, rows):
    """Few rows: what FSDP2 gathers and reduces is most of the peak. Many rows: what a recomputed block needs is."""
    estimates, blocks = estimator
    replicate, shard, tp = mesh
    one = Candidate(1, replicate, shard, tp, 1, rows, recompute=saved is not None, saved_blocks=saved or 0)
    batch = (torch.randn(rows * replicate * shard, 128, 64),)
    predicted = mw.predict(Tower, batch, Plan.parse(one.plan({}, blocks)), hardware="a100-80", loss=itself).peak
    assert estimates.memory.peak(one) == pytest.approx(predicted, rel=0.06)


PIPELINES = [((2, 1, 1), 1), ((4, 1, 1), 1), ((2, 1, 2), 1), ((2, 1, 2), 2), ((2, 2, 1), 2)]
QUICK_PIPELINES = [((4, 1, 1), 1, False), ((2, 1, 2), 1, True), ((2, 1, 2), 2, False)]


@pytest.mark.parametrize(
    "mesh, chunks, recompute", cases([(*case, how) for case in PIPELINES for how in (False, True)], QUICK_PIPELINES)
)
def test_the_estimate_of_a_pipeline_is_that_of_a_prediction(estimator, mesh, chunks, recompute):
    """Each stage holds microbatches as its schedule does, what its blocks store of them, and over tp what it received."""
    estimates, blocks = estimator
    pp, shard, tp = mesh
    one = Candidate(pp, 1, shard, tp, 8, PIPELINE_ROWS // 8 // shard, chunks, recompute=recompute)
    batch = (torch.randn(PIPELINE_ROWS, 128, 64),)
    predicted = mw.predict(Tower, batch, Plan.parse(one.plan({}, blocks)), hardware="a100-80", loss=itself).peak
    assert estimates.memory.peak(one) == pytest.approx(predicted, rel=0.1 if recompute else 0.06)
