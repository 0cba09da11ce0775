"""What is told of a run from its folder: the steps, the checkpoints, and what is not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from commands import meshwright
from meshwright.checkpoint.jobs import save_checkpoint
from meshwright.cli.step_timelines import worth_drawing
from meshwright.draw.html.run import run_page
from meshwright.draw.plain import from_plain, to_plain
from meshwright.draw.run import StepInTime, drawn
from meshwright.draw.timeline import Exchange, PipelineLane, Slot, Timeline, Transfer
from meshwright.errors import PlanError
from meshwright.train.history import History, RankMemory, history
from meshwright.train.metrics import Metrics
from meshwright.train.progress import Progress
from test_shard_map import printed


def told(step: int, loss: float) -> Progress:
    memories = (2**20 * step, 2**20 * (5 - step)) if step > 1 else (7,)  # the first step ran on one rank
    return Progress(step, 4, loss, 1.0 / step, 100.0 * step, "tokens", 2**20 * step, 0.25, 0, 0.5, memories)


STEP = Timeline(
    "seconds", "1f1b", 1, 4.0,
    (
        PipelineLane((0,), (0,), (Slot(0, 1, "forward", 0, 0, {"compute": 0.75, "communication over tp": 0.25}),
                          Slot(3, 4, "backward", 0, 0, {"compute": 1.0})), 1),
        PipelineLane((1,), (1,), (Slot(1, 2, "forward", 1, 0, {"compute": 1.0}), Slot(2, 3, "backward", 1, 0, {"compute": 1.0})), 1),
    ),
    (Transfer(0, 1, 1, 1, "forward", 0, 2048), Transfer(1, 0, 3, 3, "backward", 0, 2048)),
    (Exchange(0, "tp", "all_reduce", 0.5, 0.75, 4096),),
)  # fmt: skip
PLAN = "mesh: {pp: 2}\n"


def a_run(folder: Path) -> Path:
    """Four steps, the third not finite; a checkpoint after the second and the fourth; ranks were compared after the first, and
    the third was observed."""
    metrics, module = Metrics(folder), nn.Linear(3, 2)
    metrics.start(PLAN)
    for step, loss in enumerate((3.0, 2.0, float("nan"), 1.0), 1):
        metrics.write(told(step, loss))
        if step in (2, 4):
            save_checkpoint(folder, module, step=step)
    metrics.verdict(1, {"parameters": 5, "activations": 2})
    metrics.timeline(3, PLAN, STEP.to_json())
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
    assert run.memories == (RankMemory(4 * 2**20, 4 * 2**20), RankMemory(2**20, 3 * 2**20))
    assert [(one.step, one.compared, one.differences) for one in run.comparisons] == [
        (1, {"parameters": 5, "activations": 2}, ())
    ]
    assert [(one.step, one.plan) for one in run.observed] == [(3, PLAN)]
    assert from_plain(Timeline, run.observed[0].timeline) == STEP
    assert [(one.step, one.plan) for one in run.starts] == [(1, PLAN)]
    assert not run.absent
    assert from_plain(History, json.loads(json.dumps(to_plain(run)))) == run


def test_a_start_whose_steps_run_again_is_forgotten_with_them(tmp_path: Path) -> None:
    for step, plan in ((0, "mesh: {tp: 2}\n"), (2, "mesh: {pp: 2}\n"), (1, PLAN)):
        metrics = Metrics(tmp_path, step)
        metrics.start(plan)
        metrics.write(told(step + 1, 1.0))
        metrics.close()
    run = history(tmp_path)
    assert run.steps == (1, 2) and [(one.step, one.plan) for one in run.starts] == [(1, "mesh: {tp: 2}\n"), (2, PLAN)]


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "metrics.jsonl").unlink()
    (run / "run.json").unlink()
    (run / "verdicts.jsonl").unlink()
    (run / "timelines.jsonl").unlink()
    (run / "hang.txt").write_text("rank 1 waits in an all_reduce")
    next((run / history(run).checkpoints[0].name).glob("*.distcp")).unlink()
    again = history(run)
    assert not again.series and again.hang and again.checkpoints[0].problem and not again.checkpoints[1].problem
    assert [line.partition(":")[0] for line in again.absent] == [
        "steps", "what was trained", "memory of each rank", "verdicts", "a step in time",
    ]  # fmt: skip
    assert "ranks stopped answering" in printed(drawn(again)) and "an all_reduce" in run_page(again)


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(PlanError, match=r"metrics\.jsonl|no such folder"):
            history(folder)
        assert "meshwright train" in meshwright("report", folder, code=2).stderr


def test_the_command_tells_a_run_and_writes_its_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    text = meshwright("report", run).output
    assert "steps 1 to 4" in text and "█" in text
    assert "ranks were compared 1 time, and equal; after step 1: 5 parameters, 2 activations" in text
    assert "rank 1" in text and "step 3 in time" in text
    assert "hf:gpt2" in (run / "report.html").read_text()
    assert history(run) == history(a_run(tmp_path / "two") and run)  # a page in the folder is no part of the run
    data = json.loads(meshwright("report", run, "--json").output)
    assert data["steps"] == [1, 2, 3, 4] and len(data["in_time"]) == 1
    assert from_plain(Timeline, data["in_time"][0]["measured"]) == STEP and data["in_time"][0]["predicted"] is None
    assert "h101" in meshwright("report", run, "--hardware", "h101", code=2).output
    assert "one of 3" in meshwright("report", run, "--step", "4", code=2).stderr


def observed_often(folder: Path, steps: int) -> Path:
    """A run of which as many steps were observed: the second is the slowest, with 40 s, and others take 10 to 20 s."""
    metrics = Metrics(folder)
    for step in range(1, steps + 1):
        metrics.write(told(step, 1.0))
        metrics.timeline(step, PLAN, replace(STEP, length=40.0 if step == 2 else 10.0 + 10 * step / steps).to_json())
    metrics.close()
    return folder


def test_one_chooses_among_the_steps_that_were_observed(tmp_path: Path) -> None:
    run = observed_often(tmp_path, 4)
    text = meshwright("report", run).output
    assert all(name in text for name in ("step 1 (first, fastest)", "step 2 (slowest)", "step 4 (last)"))
    assert "step 4 in time" in text and "Step 4 in time" in (run / "report.html").read_text()
    assert "step 2 in time" in meshwright("report", run, "--step", "2").output
    assert "Step 2 in time" in (run / "report.html").read_text()


def test_of_many_observed_steps_the_first_the_last_and_the_slowest_are_drawn(tmp_path: Path) -> None:
    told = history(observed_often(tmp_path, 500))
    drawn = [one.step for one in worth_drawing(told.observed)]
    assert 20 <= len(drawn) <= 24 and {1, 2, 500} <= set(drawn) and drawn == sorted(drawn)
    assert 260 in {one.step for one in worth_drawing(told.observed, 260)} - set(drawn)


def test_a_difference_is_an_alarm(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    metrics = Metrics(run, 4)
    metrics.verdict(4, {"parameters": 5}, ["parameter head.weight: rank 1 differs from rank 0"])
    metrics.close()
    told = history(run)
    text = printed(drawn(told))
    assert "ranks differed after step 4: parameter head.weight: rank 1 differs from rank 0" in text
    assert 'role="alert"' in run_page(told) and "Ranks differed" in run_page(told)


def test_a_step_is_told_beside_its_prediction(tmp_path: Path) -> None:
    faster = replace(
        STEP,
        length=2.0,
        lines=(
            PipelineLane((0,), (0,), (Slot(0, 2, "forward", 0, 0, {"compute": 2.0}),), 1),
            PipelineLane((1,), (1,), (), 1),
        ),
    )
    text = printed(drawn(history(a_run(tmp_path)), [StepInTime(3, STEP, faster, "a machine")]))
    rows = [line.split() for line in text.splitlines()]
    assert ["forward", "1", "s", "875", "ms", "−125", "ms"] in rows  # in the mean over both stages
    assert ["communication", "over", "tp", "0", "µs", "125", "ms", "+125", "ms"] in rows
    assert ["the", "step", "2", "s", "4", "s", "+2", "s"] in rows and "predicted (a machine)" in text
