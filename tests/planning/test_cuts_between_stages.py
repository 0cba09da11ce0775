"""Where a model is cut into stages: exact, balanced by work, as the plan says, or an error that says where it can be."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.planning.pipeline import _best


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_the_smallest_largest_cost_is_found(costs: list[int], stages: int) -> None:
    n = len(costs)
    found, cuts = _best(n, stages, lambda k, i, j: float(sum(costs[i:j])), max)
    every = [
        max(sum(costs[i:j]) for i, j in zip((0, *chosen), (*chosen, n), strict=True))
        for chosen in combinations(range(1, n), stages - 1)
    ]
    assert found == (min(every) if every else inf)
    if every:
        assert max(sum(costs[i:j]) for i, j in zip((0, *cuts), (*cuts, n), strict=True)) == found


class Stack(nn.Module):
    def __init__(self, blocks: int = 8, head: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(32, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class HeavyHead(Stack):
    def __init__(self) -> None:
        super().__init__(8, 32 * 4)  # as much work as four blocks


BATCH = (torch.ones(4, 32),)


def layers_of(recipe: mw.Recipe) -> list[list[int]]:
    return [[int(m.split(".")[1]) for m in s.modules if m.startswith("layers.")] for s in recipe.stages]


def test_stages_are_balanced_by_work_with_the_head_counted() -> None:
    assert layers_of(mw.make_recipe(Stack, "pp=2", BATCH)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    heavy = layers_of(mw.make_recipe(HeavyHead, "pp=2", BATCH))
    assert len(heavy[0]) > len(heavy[1]) + 1
    shares = [s.work for s in mw.make_recipe(HeavyHead, "pp=2", BATCH).stages]
    assert max(shares) / sum(shares) < 0.56


def test_the_plan_places_modules() -> None:
    plan = {"mesh": {"pp": 2}, "modules": {"layers.0-1": {"on": "pp[0]"}, "layers.2-7": {"on": "pp[1]"}}}
    assert layers_of(mw.make_recipe(Stack, plan, BATCH)) == [[0, 1], [2, 3, 4, 5, 6, 7]]
    plan = {"mesh": {"pp": 4}, "modules": {"layers.5": {"on": "pp[0]"}}}
    assert layers_of(mw.make_recipe(Stack, plan, BATCH))[0] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("modules", "where", "required"),
    [
        ({"layers.0": {"on": "pp[1]"}, "layers.7": {"on": "pp[0]"}}, "modules.on", "layers.1"),
        ({"layers.3": {"on": "pp[2]"}}, "modules.layers.3.on", "from 0 to 1"),
        ({"layers.8-9": {"on": "pp[1]"}}, "modules.layers.8-9", "the name of one"),
    ],
)
def test_places_that_cannot_be_are_told(modules: dict[str, object], where: str, required: str) -> None:
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Stack, {"mesh": {"pp": 2}, "modules": modules}, BATCH)
    (finding,) = caught.value.findings
    assert finding.where == where
    assert required in finding.required


class Giant(nn.Module):
    """One module, with nothing in it to cut between but functions of a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x).mean()


class Reads(Stack):
    """What it does after its first block follows from a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            if x.mean() > 0:
                x = layer(x)
        return self.head(x).square().mean()


def test_a_model_that_cannot_be_cut_so_often_says_where_it_can_be() -> None:
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Giant, "pp=4", BATCH)
    (finding,) = caught.value.findings
    assert finding.where == "mesh.pp" and "4 stages, of a model that can be cut in" in finding.given
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Reads, "pp=6", BATCH)
    (finding,) = caught.value.findings
    assert "reads a value" in finding.given
    fixed = mw.Plan.from_yaml(finding.fix)
    assert len(mw.make_recipe(Reads, fixed, BATCH).stages) == fixed.mesh.axis_size("pp")


@pytest.mark.parametrize(("ranks", "each"), [(2, 3), (4, 2)])
def test_fewer_stages_a_rank_are_asked_for_first(ranks: int, each: int) -> None:
    plan = {"mesh": {"pp": ranks}, "schedule": "interleaved", "stages_per_rank": each}
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Reads, plan, BATCH)
    (finding,) = caught.value.findings
    fixed = {**plan, **yaml.safe_load(finding.fix)}
    if fixed["schedule"] != "interleaved":
        del fixed["stages_per_rank"]
    assert 2 <= len(mw.make_recipe(Reads, fixed, BATCH).stages) < ranks * each


def test_many_stages_go_into_blocks() -> None:
    """Two blocks of two layers and a head, on six ranks: where blocks are too few, they are cut themselves."""

    recipe = mw.make_recipe(_Two, "pp=6", BATCH)
    assert len(recipe.stages) == 6
    assert any("a cut between stages goes through it" in note for note in recipe.notes)


class _Two(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2))


class _Nested(nn.Module):
    """Pads its rows apart between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.within, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nested.as_nested_tensor(list(self.first(x).unbind()), layout=torch.jagged)
        return self.last(self.within(h).to_padded_tensor(0.0)).square().mean()


def test_a_nested_tensor_stays_in_its_stage() -> None:
    recipe = mw.make_recipe(_Nested, "pp=3", (torch.ones(4, 2, 8),))
    assert [stage.modules for stage in recipe.stages] == [("first",), ("within",), ("last",)]
