"""Two plans of one model, term by term: what they differ in sums up to what they take more or less."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
import torch
from rich.console import Console, RenderableType
from torch import nn

import meshwright as mw
from meshwright.draw.difference import drawn
from meshwright.prediction.difference import Difference


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def loss(output: torch.Tensor) -> torch.Tensor:
    return output


def text_of(picture: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


BATCH = (torch.linspace(-1, 1, 8 * 64).view(8, 64),)
PLANS = ({"mesh": {"tp": 2}}, {"mesh": {"pp": 2}, "microbatches": 4, "recompute": "blocks"})


@pytest.fixture(scope="module")
def difference() -> Difference:
    return mw.compare(Tower, BATCH, PLANS, hardware="h100", loss=loss)


def test_the_terms_sum_up_to_the_step_and_the_items_to_the_peak(difference: Difference) -> None:
    for which, prediction in enumerate(difference.predictions):
        assert sum(pair[which] for pair in difference.seconds.values()) == pytest.approx(prediction.seconds.seconds)
        assert sum(pair[which] for pair in difference.memory.values()) == prediction.peak
    assert difference.seconds["communication over tp"][0] > 0 == difference.seconds["communication over tp"][1]
    assert difference.seconds["waiting for other stages"][0] == 0 < difference.seconds["waiting for other stages"][1]
    assert {"compute", "host", "clip", "optimizer"} <= set(difference.seconds)


def test_it_says_what_predict_says_of_each_and_what_the_plans_say_differently(difference: Difference) -> None:
    for plan, prediction in zip(PLANS, difference.predictions, strict=True):
        alone = mw.predict(Tower, BATCH, plan, hardware="h100", loss=loss)
        assert alone.seconds.waterfall == prediction.seconds.waterfall and alone.peak == prediction.peak
    assert difference.settings == {
        "mesh": ({"tp": 2}, {"pp": 2}), "microbatches": (None, 4), "recompute": (None, "blocks")
    }  # fmt: skip


def test_its_data_has_every_term_with_its_difference(difference: Difference) -> None:
    data = difference.json()
    for row in (*data["seconds"].values(), *data["memory"].values()):
        assert row["difference"] == row["second"] - row["first"]
    assert [p["mesh"] for p in data["predictions"]] == ["tp=2", "pp=2"]


def test_each_bar_begins_where_the_one_before_ends(difference: Difference) -> None:
    text = text_of(drawn(difference, ["a.yaml", "b.yaml"]))
    lines = text.partition("seconds of a step")[2].partition("a step")[0].splitlines()
    bars = [(line.index(bar[0]), line.rindex(bar[0]) + 1, bar[0])
            for line in lines if (bar := "".join(c for c in line if c in "█▒"))]  # fmt: skip
    assert len(bars) >= 4 and {mark for *_, mark in bars} == {"█", "▒"}
    for (left, right, mark), (begin, end, then) in pairwise(bars):
        stops, starts = right if mark == "█" else left, begin if then == "█" else end
        assert abs(stops - starts) <= 1, "but for a bar of one column, which stands for less"
    assert "tp=2" in text and "blocks" in text and "% less time" in text


def test_of_a_plan_and_itself_nothing_differs() -> None:
    same = mw.compare(Tower, BATCH, ["tp=2", "tp=2"], hardware="h100", loss=loss)
    assert not same.settings and all(first == second for first, second in same.seconds.values())
    text = text_of(drawn(same, ["a", "b"]))
    assert "the same" in text and "█" not in text.replace("bars: █", "")
