"""The proof: every model of the issue in every layout, equal to one process in float64.

Cases marked ``proof`` are run by ``make proof``: they repeat, in other combinations, what the others show.
"""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from zoo import ZOO

LAYOUTS = {
    "tp2": {"mesh": {"tp": 2}},
    "tp4": {"mesh": {"tp": 4}},
    "dp_shard2": {"mesh": {"dp_shard": 2}},
    "dp_replicate2": {"mesh": {"dp_replicate": 2}},
    "dp_shard2-tp2": {"mesh": {"dp_shard": 2, "tp": 2}},
    "dp_replicate2-dp_shard2-tp2": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}},
    "tp2-sequence": {"mesh": {"tp": 2}, "sequence_parallel": True},
}
ISSUE = [name for name, entry in ZOO.items() if entry.family == "issue"]
ODD = [name for name, entry in ZOO.items() if entry.family == "odd"]
# What continuous integration runs: each layout with models that are hard for it. Eight ranks get a model that needs no
# package: each of them would import it.
HARD = {
    "dp_shard2-tp2": {"nanogpt"},  # mixtral takes nine seconds there
    "tp2": {"mixtral"},
    "tp4": {"llama", "t5"},
    "dp_shard2": {"gpt2"},
    "dp_replicate2": {"mixtral"},
    "dp_replicate2-dp_shard2-tp2": set(),  # three axes of eight ranks: test_pipeline has others
    "tp2-sequence": {"llama", "t5"},
}


def cases():
    for name in ISSUE:
        for layout in LAYOUTS:
            yield pytest.param(name, layout, marks=() if name in HARD[layout] else pytest.mark.proof)


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_the_same_as_one_process(name, layout, workers):
    entry = ZOO[name]
    report = mw.check(entry.build, entry.batch(), LAYOUTS[layout], workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert "does not repeat itself" not in str(report), "a rank drew other values than rank 0"
    assert str(report.dtype).endswith("float64")
    assert report.tolerance <= 1e-9
    if "tp" in layout:
        assert any(isinstance(line.tp, mw.Shard) for line in report.recipe), "tensor parallelism cut nothing"


REFUSES_FLOAT64 = {"mixtral_grouped"}  # a function of its forward does: it is judged in float32


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp_shard2-tp2", marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", ODD)
def test_models_as_people_write_them(name, layout, workers):
    entry = ZOO[name]
    dtype = None if name in REFUSES_FLOAT64 else torch.float64
    report = mw.check(entry.build, entry.batch(), LAYOUTS[layout], workers=workers, dtype=dtype)
    assert report.passed, str(report)
    assert "does not repeat itself" not in str(report), "a rank drew other values than rank 0"


SETTINGS = {
    "microbatches": {"mesh": {"dp_shard": 2}, "microbatches": 2},
    "microbatches on one rank": {"mesh": {"tp": 1}, "microbatches": 4},
    "recompute": {"mesh": {"dp_shard": 2, "tp": 2}, "recompute": "blocks"},
    "recompute, sequence": {"mesh": {"tp": 2}, "recompute": "blocks", "sequence_parallel": True},
    "tp outside": {"mesh": {"tp": 2, "dp_shard": 2}},
    "no reshard": {"mesh": {"dp_shard": 2}, "reshard_after_forward": False},
    "odd ranks": {"mesh": {"dp_shard": 3}},
    "odd tp": {"mesh": {"tp": 3}},
}


USUAL = {("nanogpt", s) for s in SETTINGS}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(n, s, marks=() if (n, s) in USUAL else pytest.mark.proof)
        for n in ("nanogpt", "llama", "bert", "t5")
        for s in SETTINGS
    ],
)
def test_settings(name, setting, workers):
    entry = ZOO[name]
    report = mw.check(entry.build, entry.batch(), SETTINGS[setting], workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
