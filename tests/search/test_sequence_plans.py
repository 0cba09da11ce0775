"""Plans with tp and without sequence parallelism: looked at where collectives make them faster, and estimated as predicted."""

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
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.shardings import Shardings, may_gather_slowly
from meshwright.search.space import Sharding, candidates

GLOO = Link(4e-4, 1e9, Curve(((1.0, 1.0),)), 0.1, "gloo", kinds={"all_gather": 1.0, "reduce_scatter": 1.8})
CPU = replace(read_profile("v100"), name="cpu", cores=2, devices_per_node=4096, node=GLOO)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Tower(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.table(ids))).flatten(0, 1), ids.flatten())


def batch() -> tuple[Tensor]:
    return (torch.arange(2 * 64).remainder(100).view(2, 64),)


def loss(output: Tensor) -> Tensor:
    return output


def test_sequences_stay_whole_over_gloo_and_are_estimated_as_predicted() -> None:
    found = mw.find_plans(Tower, batch(), devices=2, hardware=CPU, loss=loss, top=4)
    (over_tp,) = [proposal for proposal in found.plans if proposal.estimate.candidate.tp == 2]
    assert over_tp.plan.settings() == {"mesh": {"tp": 2}, "microbatches": 1}
    assert not over_tp.estimate.candidate.sequence
    prediction = mw.predict(Tower, batch(), over_tp.plan, hardware=CPU, loss=loss)
    assert over_tp.terms["tp"] == pytest.approx(prediction.seconds.waterfall["communication over tp"], rel=0.1)
    assert over_tp.seconds == pytest.approx(prediction.seconds.seconds, rel=0.25)
    sequence = mw.predict(Tower, batch(), {"mesh": "tp=2", "sequence_parallel": True}, hardware=CPU, loss=loss)
    assert prediction.seconds.seconds < sequence.seconds.seconds


def test_only_where_an_all_reduce_is_faster_or_nothing_is_said() -> None:
    rehearsals = Rehearsals(Tower, batch(), {}, loss, adamw_on(CPU), 1.0, accelerator=False)
    costs = rehearsals.layer_costs(Sharding(2))
    assert may_gather_slowly(costs, CPU)
    every = partial(candidates, 4, 4, 8, [1, 2, 4], 4, recompute=True)
    assert {of.tp for of in every(shardings=[Sharding(2, sequence=False)]) if not of.sequence} == {2}
    assert all(of.sequence for of in every())
    said = Shardings(rehearsals, CPU, {"sequence_parallel": True}, 4, lambda text: None)
    assert all(sharding.sequence for sharding in said.others({Sharding(2): costs}, [2]))
