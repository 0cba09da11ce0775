"""Training in the plan's own types: float32, and bfloat16 with parameters in float32, in every kind of layout.

float64 is the sharp judge and runs elsewhere; what a job does with types, it does not see. ``check`` judges a job in the
precision of its plan too: three steps, one of them of two forwards and backwards, against one device in the same types.
"""

from __future__ import annotations

from typing import Any

import pytest

import branching
import meshwright as mw
from branching import beside, on
from meshwright.workers.pool import LocalWorkers
from zoo import ZOO

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard2-tp2": {"mesh": {"dp_shard": 2, "tp": 2}, "microbatches": 2},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2},
    "pp2-dp_shard2": {"mesh": {"pp": 2, "dp_shard": 2}, "microbatches": 2},
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "recompute": {"mesh": {"dp_shard": 2, "tp": 2}, "recompute": "blocks"},
    "sequence": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "zero_bubble": {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "zero_bubble", "microbatches": 2},
    "odd": {"mesh": {"tp": 3}},
}
NO_BFLOAT16 = {"batchnorm", "complex_rotary", "codebook"}  # of which a kernel wants float32
PRECISIONS = ("float32", "bfloat16")
MODELS = [name for name, entry in ZOO.items() if entry.family == "issue"]
# What continuous integration runs: of each axis and each type something, with a model that needs no package.
OFTEN = {("nanogpt", "dp_shard2-tp2", "float32"), ("nanogpt", "pp2-tp2", "bfloat16")}


def same_in_its_own_types(build: Any, batch: Any, plan: dict[str, Any], workers: LocalWorkers) -> mw.Report:
    """The report of a check that compared in the plan's types too."""
    report = mw.check(build, batch, plan, workers=workers)
    assert report.passed, str(report)
    assert any(f"compared in {plan['precision']} too" in note for note in report.notes), report.notes
    return report


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        pytest.param(n, k, p, marks=() if (n, k, p) in OFTEN else pytest.mark.proof)
        for n in MODELS
        for k in LAYOUTS
        for p in PRECISIONS
    ],
)
def test_models_train_in_the_types_of_their_plan(name: str, layout: str, precision: str, workers: LocalWorkers) -> None:
    entry = ZOO[name]
    same_in_its_own_types(entry.build, entry.batch(), {**LAYOUTS[layout], "precision": precision}, workers)


ODD = [name for name, entry in ZOO.items() if entry.family == "odd" and entry.float64 and not entry.random]
ODD_OFTEN = {("branch_on_parameter", "dp_shard2-tp2", "bfloat16")}  # FSDP2 does not follow the inputs of a routed model


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        pytest.param(n, k, p, marks=() if (n, k, p) in ODD_OFTEN else pytest.mark.proof)
        for n in ODD
        for k in ("dp_shard2-tp2", "pp2-tp2")
        for p in PRECISIONS
    ],
)
def test_models_as_people_write_them(name: str, layout: str, precision: str, workers: LocalWorkers) -> None:
    entry = ZOO[name]
    plan = {**LAYOUTS[layout], "precision": precision}
    if name in NO_BFLOAT16 and precision == "bfloat16":
        report = mw.check(entry.build, entry.batch(), plan, workers=workers)
        assert report.passed and any("raises on one device" in note for note in report.notes), str(report)
    else:
        same_in_its_own_types(entry.build, entry.batch(), plan, workers)


BRANCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "toy": (branching.Toy, beside(1, 2)),
    "siamese": (branching.Siamese, {"mesh": {"tp": 2}, "modules": {"tower": {"on": ["tp[0]", "tp[1]"]}}}),
    "nested": (
        branching.Nested, on({"tp": 3}, inner="tp[0:2]", other="tp[2]", inner__left="tp[0]", inner__right="tp[1]")
    ),
    "toy, sharded": (branching.Toy, beside(2, 2, b={"dp_shard": 2})),
    "toy in stages": (branching.Toy, {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}}),
    "toy over data": (branching.Toy, {**beside(1, 1), "mesh": {"dp_shard": 2, "tp": 2}}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(c, p, marks=() if (c, p) == ("toy", "bfloat16") else pytest.mark.proof)
        for c in BRANCHES
        for p in PRECISIONS
    ],
)
def test_branches_train_in_the_types_of_their_plan(case: str, precision: str, workers: LocalWorkers) -> None:
    build, plan = BRANCHES[case]
    same_in_its_own_types(build, branching.rows(), {**plan, "precision": precision}, workers)
