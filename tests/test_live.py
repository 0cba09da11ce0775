"""What `meshwright train` shows while it trains: a panel on a terminal, lines otherwise, and where to look in the end."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from commands import meshwright
from meshwright.cli import live
from meshwright.cli.live import Live
from meshwright.draw.timeline import Timeline
from meshwright.train.history import history
from meshwright.train.progress import Progress


def told(step: int, ranks: int = 2, seconds: float = 2.0) -> Progress:
    memories = tuple(2**30 * (rank + 1) for rank in range(ranks))
    return Progress(step, 20, 4.0 / step, 1.0, 5200.0, "tokens", memories[0], 0.04, 1, seconds, memories)


def shown(monkeypatch: pytest.MonkeyPatch, steps: int, ranks: int = 2, *, terminal: bool, rank_0: bool = True) -> str:
    file = io.StringIO()
    monkeypatch.setattr(
        live, "console", lambda: Console(file=file, force_terminal=terminal, width=100, color_system=None)
    )
    with Live(20, "hf:gpt2 over tp=2", shown=rank_0) as panel:
        for step in range(1, steps + 1):
            panel.tell(told(step, ranks))
    return file.getvalue()


def test_a_terminal_has_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = shown(monkeypatch, 4, terminal=True).rpartition("╭")[2]
    assert "hf:gpt2 over tp=2" in panel and "4/20" in panel
    assert "0:32 to go" in panel  # 16 steps of two seconds
    assert re.search(r"loss +1\.0000 +█▃▁▁ ", panel) and "5.2 k tokens/s, 1 skipped" in panel and "4 %" in panel
    assert re.search(r"memory +rank 0 +1\.0 GiB +█{6} ", panel) and re.search(r"rank 1 +2\.0 GiB +█{12} ", panel)


def test_many_ranks_are_told_by_the_least_and_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = shown(monkeypatch, 1, ranks=64, terminal=True)
    assert "1.0 GiB (rank 0) to 64.0 GiB (rank 63)" in panel and "rank 5 " not in panel


def test_a_pipe_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, 20, terminal=False).splitlines()
    assert len(lines) == 11 and "╭" not in "".join(lines)  # the first step, and every tenth part
    assert lines[1] == (
        "step 2/20  loss 2.0000  5.2 k tokens/s  1.0 GiB to 2.0 GiB  waiting 4 %  1 skipped  0:36 to go"
    )
    assert "to go" not in lines[-1]


def test_other_ranks_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shown(monkeypatch, 20, terminal=True, rank_0=False) and not shown(
        monkeypatch, 20, terminal=False, rank_0=False
    )


TARGET = """
import torch
from torch import nn

def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), (torch.randn(8, 8),)

def loss(output):
    return output.square().mean()
"""


@pytest.mark.proof
def test_the_end_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    run = ["toy.py:toy", "--loss", "toy.py:loss", "--mesh", "dp_shard=2", "--out", "run"]
    text = meshwright("train", *run, "--steps", "4", "--observe-every", "5").output
    assert "checkpoint  run/step-00000004, " in text and "report      run/report.html" in text
    assert "verdict     ranks were compared 1 time, and equal; after step 1: 4 parameters" in text
    kept = history(tmp_path / "run")
    assert len(kept.memories) == 2 and all(0 < one.last <= one.most for one in kept.memories)
    assert [one.step for one in kept.observed] == [3] and not kept.absent
    assert "Step 3 in time" in (tmp_path / "run" / "report.html").read_text()
    beside = meshwright("report", "run", "--hardware", "h100").output
    assert "predicted (h100-sxm)" in beside and "communication over dp_shard" in beside
    timeline = Timeline.from_json(json.dumps(kept.observed[0].timeline))
    whats = [slot.what for slot in timeline.lines[0].slots]
    assert whats == ["begin", "forward", "backward", "end", "clip", "agree", "optimizer"]
