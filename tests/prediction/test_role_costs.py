"""What is rehearsed of few blocks, microbatches and stages is what all of them take."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright import predict
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.prediction import role_costs
from meshwright.prediction.blocks import folding_of
from meshwright.prediction.composition import Templates
from meshwright.schedule import Action

WIDTH, WORDS = 64, 256


class Block(nn.Module):
    def __init__(self, number: int, *, wide: bool = False) -> None:
        super().__init__()
        self.number, self.wide, self.drop = number, wide, 0.01 * number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h, scale):
        inner = nn.functional.gelu(self.up(self.norm(h)))
        if self.wide:  # more work, with the same parameters
            inner = inner + torch.tanh(inner) * inner.sigmoid()
        return h + self.down(inner) * scale, inner.mean((1, 2))


class Tower(nn.Module):
    """Blocks that also give a number a row, and every third of which does more."""

    every = 1000

    def __init__(self, depth: int = 14) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(i, wide=i % self.every == self.every - 1) for i in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        h, means = self.table(ids), []
        for block in self.blocks:
            h, mean = block(h, torch.ones((), dtype=h.dtype))
            means.append(mean)
        loss = nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())
        return loss + 1e-3 * torch.stack(means).square().mean()


class Mixed(Tower):
    every = 3


class Chain(Tower):
    """Nothing but hidden values goes from block to block."""

    def forward(self, ids):
        h = self.table(ids)
        for block in self.blocks:
            h, _ = block(h, torch.ones((), dtype=h.dtype))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


class Curious(Tower):
    """Its forward looks into blocks, so that none can be passed through."""

    def forward(self, ids):
        widths = [block.up.weight.shape[0] for block in self.blocks]
        return super().forward(ids) * (sum(widths) / len(widths))


def loss(output):
    return output


def tokens(rows=32, length=16):
    return (torch.arange(rows * length).remainder(WORDS).view(rows, length),)


LAYOUTS = [
    (Tower, "dp_shard=2", {}),
    (Mixed, "tp=2", {}),
    (Tower, "dp_replicate=2,dp_shard=2", {"precision": "bfloat16", "recompute": "blocks", "microbatches": 8}),
    (Tower, "pp=2,dp_shard=2", {"microbatches": 8}),
    (Mixed, "pp=2", {"microbatches": 8, "schedule": "gpipe"}),
    (Tower, "pp=4", {"microbatches": 16}),
    (Tower, "pp=2", {"microbatches": 8, "schedule": "interleaved"}),
    (Tower, "pp=2", {"microbatches": 8, "schedule": "zero_bubble"}),
]


HARDWARE = [read_profile("h100"), replace(read_profile("h100"), cores=4)]  # with a queue, and without


# What continuous integration runs: no pipeline, on one kind of hardware.
OFTEN = {(1, 1)}


@pytest.mark.parametrize(
    ("layout", "hardware"),
    [
        pytest.param(
            k, h, marks=() if (k, h) in OFTEN else pytest.mark.proof, id=f"{LAYOUTS[k][1]}-{LAYOUTS[k][2]}-{kind}"
        )
        for k in range(len(LAYOUTS))
        for h, kind in enumerate(("gpu", "cpu"))
    ],
)
def test_what_is_folded_is_what_all_blocks_take(layout, hardware):
    (model, mesh, options), profile = LAYOUTS[layout], HARDWARE[hardware]
    plan = {"mesh": mesh, **options}
    folded, all_of_it = (
        predict(model, tokens(), plan, loss=loss, hardware=profile, fold=fold) for fold in (True, False)
    )
    for role in all_of_it.roles:
        memory, expected = folded.memory(role.rank), all_of_it.memory(role.rank)
        assert memory.peak == pytest.approx(expected.peak, rel=0.005)
        assert memory.persistent == pytest.approx(expected.persistent, rel=0.005)
        assert sum(memory.items.values()) == pytest.approx(memory.peak, rel=1e-3)
        assert min(memory.items.values()) > 0
    assert folded.seconds.seconds == pytest.approx(all_of_it.seconds.seconds, rel=1e-3)
    assert folded.seconds.waterfall == pytest.approx(all_of_it.seconds.waterfall, rel=1e-2, abs=1e-6)


def folding(model, plan):
    planned = Planned(model, Plan.parse(plan), tokens(), loss, whole_batch=True)
    return folding_of(planned.model, planned.recipe)


def test_as_few_blocks_as_can_be_are_rehearsed():
    fold = folding(lambda: Tower(40), "dp_shard=2")
    assert len(fold.base.blocks) == 36
    assert [(len(more.blocks), weights) for more, weights in fold.more] == [(35, (36,))]
    assert len(folding(lambda: Mixed(24), "dp_shard=2").more) == 2  # two kinds of blocks
    assert not folding(lambda: Tower(5), "dp_shard=2").base.blocks


def test_stages_that_do_the_same_are_rehearsed_once(monkeypatch):
    ranks = []
    rehearse = role_costs.rehearse
    monkeypatch.setattr(role_costs, "rehearse", lambda rehearsal, rank: ranks.append(rank) or rehearse(rehearsal, rank))
    prediction = predict(lambda: Chain(12), tokens(), {"mesh": "pp=6", "microbatches": 8}, loss=loss)
    assert len(prediction.roles) == 6
    assert len(set(ranks)) == 3  # the first stage, the last, and one of those between


def test_a_model_that_looks_into_its_blocks_is_rehearsed_whole():
    folded, all_of_it = (predict(Curious, tokens(), "dp_shard=2", loss=loss, fold=fold) for fold in (True, False))
    assert folded.json() == all_of_it.json()


def test_templates_are_of_first_last_and_those_between():
    rehearsed = [Action(0, kind, number) for number in range(3) for kind in "FB"]
    step = [Action(0, kind, number) for number in range(5) for kind in "FB"]
    templates = Templates([(action, str(action)) for action in rehearsed])
    assert templates.for_actions(step)[::2] == ["0F0", "0F1", "0F1", "0F1", "0F2"]
    assert templates.for_actions([Action(0, "W", 0)]) == [None]
