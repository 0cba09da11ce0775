"""Branches: different blocks of a model on different groups of ranks at the same time, equal to one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import branching as models
import meshwright as mw
from branching import beside, on
from meshwright.run.workers import LocalWorkers

CLOSE = 1e-12  # relative, in float64, over five steps of the optimizer


def same(build: Any, batch: Any, plan: Any, workers: LocalWorkers) -> mw.Report:
    report = mw.check(build, batch, plan, workers=workers, tolerance=CLOSE, steps=5)
    assert report.passed, str(report)
    assert report.dtype == "float64"
    return report


# --- the forum's model ------------------------------------------------------------------------------------------------

SHARES = {
    "1+1": beside(1, 1),
    "1+3": beside(1, 3),
    "3+1": beside(3, 1),
    "2+2": beside(2, 2),
    "2+6": beside(2, 6),
    "tp2 | dp3 x tp2": beside(2, 6, b={"dp": 3, "tp": 2}),
    "dp2 | dp_shard2": beside(2, 2, a={"dp": 2}, b={"dp_shard": 2}),
    "dp_shard2 | dp_shard3": beside(2, 3, a={"dp_shard": 2}, b={"dp_shard": 3}),
    "dp_shard=2 x (1+3)": {**beside(1, 3), "mesh": {"dp_shard": 2, "tp": 4}},
    "dp_replicate=2 x (2+2), sharded within": {
        **beside(2, 2, a={"dp_shard": 2}), "mesh": {"dp_replicate": 2, "tp": 4}
    },
    "pp=2 x (1+1)": {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}},
    "microbatches": {**beside(1, 2, b={"dp": 2}), "microbatches": 3},
    "recompute": {**beside(1, 2), "recompute": "blocks"},
}  # fmt: skip


@pytest.mark.parametrize("plan", SHARES)
def test_the_forum_s_two_blocks(plan: str, workers: LocalWorkers) -> None:
    same(models.Toy, models.rows(), SHARES[plan], workers)


# --- ways of models ---------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Any, Any, Any]] = {
    "three 1+2+1": (models.Three, models.rows(), on({"tp": 4}, block_a="tp[0:1]", block_b="tp[1:3]", block_c="tp[3:4]")),
    "three 2+1+1": (models.Three, models.rows(), on({"tp": 4}, block_a="tp[0:2]", block_b="tp[2]", block_c="tp[3]")),
    "parallel attention and MLP": (
        models.Parallel, models.rows(6, 5), {"mesh": {"tp": 3}, "modules": {"*.attn": {"on": "tp[0:2]"}, "*.mlp": {"on": "tp[2:3]"}}}
    ),
    "dp_shard of parallel attention and MLP": (
        models.Parallel, models.rows(6, 5),
        {"mesh": {"dp_shard": 2, "tp": 2}, "modules": {"*.attn": {"on": "tp[0]"}, "*.mlp": {"on": "tp[1]"}}},
    ),
    "two tracks": (
        models.Tracks, models.rows(), {"mesh": {"tp": 3}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1:3]"}}}
    ),
    "inception": (
        models.Inception, models.images(),
        on({"tp": 4}, one="tp[0]", reduce3="tp[1:3]", conv3="tp[1:3]", pool="tp[3]", project="tp[3]"),
    ),
    "towers": (
        models.Towers, models.pairs(),
        on({"tp": 3}, words="tp[0:1]", text="tp[0:1]", text_out="tp[0:1]", image="tp[1:3]", image_out="tp[1:3]"),
    ),
    "towers by data": (
        models.Towers, models.pairs(),
        on({"dp_shard": 2, "tp": 2}, words="tp[0]", text="tp[0]", text_out="tp[0]", image="tp[1]", image_out="tp[1]"),
    ),
    "siamese": (models.Siamese, models.rows(), {"mesh": {"tp": 2}, "modules": {"tower": {"on": ["tp[0]", "tp[1]"]}}}),
    "siamese, unequal": (
        models.Siamese, models.rows(), {"mesh": {"dp_shard": 2, "tp": 3}, "modules": {"tower": {"on": ["tp[0:2]", "tp[2]"]}}}
    ),
    "nested": (
        models.Nested, models.rows(), on({"tp": 4}, inner="tp[0:3]", other="tp[3]", inner__left="tp[0]", inner__right="tp[1:3]")
    ),
    "several outputs": (models.Several, models.rows(), on({"tp": 3}, a="tp[0]", b="tp[1:3]")),
    "the trunk between": (models.Late, models.rows(), on({"tp": 2}, a="tp[0]", b="tp[1]")),
    "frozen": (models.Frozen, models.rows(), beside(1, 2)),
    "rows that do not divide": (models.Toy, models.rows(7), beside(2, 3, a={"dp": 2}, b={"dp_shard": 3})),
    "fewer rows than data ranks": (models.Toy, models.rows(2), beside(1, 3, b={"dp": 3})),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_models(way: str, workers: LocalWorkers) -> None:
    build, batch, plan = WAYS[way]
    same(build, batch, plan, workers)


# --- deadlock hunt ----------------------------------------------------------------------------------------------------

MANY = 200  # random graphs, of which `make test` runs some


def small() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn((6, 6), generator=draw), "y": torch.randn((6, 3), generator=draw)}


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.proof] if s % 10 else []) for s in range(MANY)])
def test_random_graphs_of_forks_and_joins_neither_hang_nor_differ(seed: int, workers: LocalWorkers) -> None:
    plan = models.Graph(seed).plan(data=seed % 3 == 0)
    if not plan["modules"]:
        pytest.skip("a graph without branches")
    build = functools.partial(models.Graph, seed)
    try:
        report = mw.check(build, small(), plan, workers=workers, tolerance=CLOSE, steps=2, timeout=30)
    except mw.PlanError as error:  # one after the other
        assert all("at the same time as" in f.given or "does not call" in f.given for f in error.findings), str(error)
        return
    assert report.passed, str(report)
