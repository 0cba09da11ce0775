"""The proof: every model of the issue in every layout, equal to one process in float64."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ISSUE)
def test_the_same_as_one_process(name, layout, workers):
    entry = ZOO[name]
    report = mw.check(entry.build, entry.batch(), LAYOUTS[layout], workers=workers)
    assert report.passed, str(report)
    assert str(report.dtype).endswith("float64")
    assert report.tolerance <= 1e-9
    if "tp" in layout:
        assert any(isinstance(line.tp, mw.Cut) for line in report.recipe), "tensor parallelism cut nothing"


@pytest.mark.parametrize("layout", ["tp2", "dp_shard2-tp2"])
@pytest.mark.parametrize("name", ODD)
def test_models_as_people_write_them(name, layout, workers):
    entry = ZOO[name]
    report = mw.check(entry.build, entry.batch(), LAYOUTS[layout], workers=workers)
    assert report.passed, str(report)


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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["nanogpt", "llama", "bert", "t5"])
def test_settings(name, setting, workers):
    entry = ZOO[name]
    report = mw.check(entry.build, entry.batch(), SETTINGS[setting], workers=workers)
    assert report.passed, str(report)
