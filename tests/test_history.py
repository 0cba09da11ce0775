"""What is told of a run from its folder: the steps, the checkpoints, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from commands import meshwright
from meshwright.checkpoint.jobs import save_checkpoint
from meshwright.draw.html.run import run_page
from meshwright.draw.plain import from_plain, to_plain
from meshwright.draw.run import drawn
from meshwright.errors import PlanError
from meshwright.train.history import History, history
from meshwright.train.metrics import Metrics
from meshwright.train.progress import Progress
from test_shard_map import printed


def told(step: int, loss: float) -> Progress:
    return Progress(step, 4, loss, 1.0 / step, 100.0 * step, "tokens", 2**20 * step, 0.25, 0, 0.5)


def a_run(folder: Path) -> Path:
    """Four steps, the third not finite; a checkpoint after the second and the fourth."""
    metrics, module = Metrics(folder), nn.Linear(3, 2)
    for step, loss in enumerate((3.0, 2.0, float("nan"), 1.0), 1):
        metrics.write(told(step, loss))
        if step in (2, 4):
            save_checkpoint(folder, module, step=step)
    metrics.close()
    (folder / "run.json").write_text(json.dumps({"target": "hf:gpt2", "lr": 0.01}))
    return folder


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = history(a_run(tmp_path))
    assert run.steps == (1, 2, 3, 4) and run.unit == "tokens" and run.about["target"] == "hf:gpt2"
    assert run.series["loss"] == (3.0, 2.0, None, 1.0)
    assert run.series["rate"] == (100.0, 200.0, 300.0, 400.0) and run.series["waiting"] == (0.25,) * 4
    assert [(one.step, one.mesh, one.problem) for one in run.checkpoints] == [
        (2, "one process", ""),
        (4, "one process", ""),
    ]
    assert all(one.bytes > 0 for one in run.checkpoints) and not run.hang
    assert [line.partition(":")[0] for line in run.absent] == ["memory of each rank", "verdicts of the guard"]
    assert from_plain(History, json.loads(json.dumps(to_plain(run)))) == run


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "metrics.jsonl").unlink()
    (run / "run.json").unlink()
    (run / "hang.txt").write_text("rank 1 waits in an all_reduce")
    next((run / history(run).checkpoints[0].name).glob("*.distcp")).unlink()
    again = history(run)
    assert not again.series and again.hang and again.checkpoints[0].problem and not again.checkpoints[1].problem
    assert [line.partition(":")[0] for line in again.absent][:2] == ["steps", "what was trained"]
    assert "ranks stopped answering" in printed(drawn(again)) and "an all_reduce" in run_page(again)


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(PlanError, match=r"metrics\.jsonl|no such folder"):
            history(folder)
        assert "meshwright train" in meshwright("report", folder, code=2).stderr


def test_the_command_tells_a_run_and_writes_its_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    text = meshwright("report", run).output
    assert "steps 1 to 4" in text and "█" in text and "verdicts of the guard" in text
    assert "hf:gpt2" in (run / "report.html").read_text()
    assert history(run) == history(a_run(tmp_path / "two") and run)  # a page in the folder is no part of the run
    assert json.loads(meshwright("report", run, "--json").output)["steps"] == [1, 2, 3, 4]
