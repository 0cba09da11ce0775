"""Set-ups of other people over four ranks: uneven shards, strided shards, copies of shards, plain shards, stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recorded_layouts as layouts
import scripts

import meshwright as mw
from meshwright.workers.pool import LocalWorkers, WorkerError


@pytest.mark.proof
@pytest.mark.parametrize("script", [layouts.hsdp, layouts.fsdp_tp, layouts.by_hand], ids=lambda f: f.__name__)
def test_a_layout_that_is_right(script: Any, tmp_path: Path, workers: LocalWorkers) -> None:
    layouts.alone(tmp_path / "one")
    workers.run(script, tmp_path / "four", ranks=4)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "four")
    assert found.passed, str(found)
    assert found.steps == 2 and found.judged["gradients"] == (34, 34)


@pytest.mark.proof
def test_shards_by_hand_in_another_order(tmp_path: Path, workers: LocalWorkers) -> None:
    layouts.alone(tmp_path / "one")
    workers.run(layouts.by_hand, tmp_path / "four", "swapped", ranks=4)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "four")
    assert found.causes[0].key == "weights_order", str(found)
    assert "1 0" in found.causes[0].says


@pytest.mark.proof
def test_fsdp1_decays_what_nothing_uses(tmp_path: Path, workers: LocalWorkers) -> None:
    """Its flat parameter has zeros for ``unused``, and AdamW's weight decay takes them for a gradient."""
    layouts.alone(tmp_path / "one")
    workers.run(layouts.fsdp1, tmp_path / "four", ranks=4)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "four")
    assert found.keys() == ["none_zeros"], str(found)
    assert found.causes[0].names == "unused.weight, unused.bias"
    assert any("flat shards" in note for note in found.notes)


@pytest.mark.proof
def test_fsdp1_without_names_says_what_it_takes(tmp_path: Path, workers: LocalWorkers) -> None:
    with pytest.raises(WorkerError, match="use_orig_params=True"):
        workers.run(layouts.fsdp1, tmp_path / "four", False, ranks=4)


@pytest.mark.proof
def test_stages_that_count_their_layers_anew(tmp_path: Path, workers: LocalWorkers) -> None:
    scripts.one(tmp_path / "one")
    workers.run(layouts.stages, tmp_path / "named", True, ranks=2)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "named")
    assert found.passed, str(found)
    workers.run(layouts.stages, tmp_path / "two", False, ranks=2)
    found = mw.compare_recordings(tmp_path / "one", tmp_path / "two")
    assert "names_missing" in found.keys() and "weights_replicas" in found.keys(), str(found)  # noqa: SIM118


@pytest.mark.proof
def test_a_rank_that_dies_leaves_no_recording(tmp_path: Path, workers: LocalWorkers) -> None:
    scripts.one(tmp_path / "one")
    with pytest.raises(WorkerError):
        workers.run(layouts.killed, tmp_path / "two", ranks=2)
    assert not (tmp_path / "two").exists()
    workers.run(scripts.data_parallel, tmp_path / "two", ranks=2)  # what is left aside is in nobody's way
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two").passed
