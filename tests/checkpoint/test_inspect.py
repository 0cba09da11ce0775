"""What is in a checkpoint: told for a person and a program, whole or damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from commands import meshwright
from meshwright.checkpoint.inspection import inspect
from meshwright.checkpoint.jobs import save_checkpoint
from meshwright.checkpoint.tensorfiles import open_folder


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).square().mean()


def saved(folder, steps=1):
    batch = {"x": torch.ones(4, 8)}
    job = mw.parallelize(Net, "dp_shard=2", batch=batch)
    optimizer = torch.optim.AdamW(job.parameters())
    for step in range(1, steps + 1):
        job.step(batch)
        optimizer.step()
        job.save(folder, optimizer, step=step)


@pytest.fixture(scope="module")
def original(workers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    workers.run(saved, folder, 2, ranks=2)
    return folder


@pytest.fixture
def run(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_what_a_checkpoint_holds(run):
    found = inspect(run / "step-00000002")[0]
    assert found.whole and found.step == 2 and found.plan and found.about["mesh"] == {"dp_shard": 2}
    assert found.bytes == sum(p.stat().st_size for p in found.path.iterdir())
    model = {t.name: t for t in found.of("model")}
    assert set(model) == set(Net().state_dict())
    first = model["layers.0.weight"]
    assert (first.shape, first.dtype, first.pieces, first.bytes) == ((8, 8), "float32", 2, 256)
    assert {t.key for t in found.of("optimizer") if t.name == "head.bias"} == {"exp_avg", "exp_avg_sq", "step"}
    assert {t.name.split(".")[0] for t in found.of("rng")} == {"0", "1"}


def test_one_is_shown_by_module_and_by_tensor(run):
    text = meshwright("inspect", run / "step-00000002").output
    assert "step 2, whole" in text and "dp_shard=2: 2 ranks" in text and "exp_avg_sq" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("layers.{0…2} ×3"))
    assert row[2:6] == ["6", "216", "864", "B"]  # 3 × (8×8 + 8) floats
    text = meshwright("inspect", run / "step-00000002", "--tensors").output
    row = next(line.split() for line in text.splitlines() if line.startswith("layers.{0…2}.weight ×3"))
    assert row[2:5] == ["8×8", "float32", "2"]


def test_a_folder_has_a_line_each_and_the_newest_is_marked(run):
    (run / ".saving-step-00000003").mkdir()
    lines = meshwright("inspect", run).output.splitlines()
    assert ["step-00000001" in lines[1], "newest" in lines[1]] == [True, False]
    assert ["step-00000002" in lines[2], "newest" in lines[2]] == [True, True]
    assert "never completed" in lines[3]
    data = json.loads(meshwright("inspect", run, "--json").output)
    assert data["newest"] == "step-00000002" and data["unfinished"] == [".saving-step-00000003"]
    assert [c["step"] for c in data["checkpoints"]] == [1, 2] and all(c["whole"] for c in data["checkpoints"])
    assert data["checkpoints"][0]["tensors"][0]["shape"] == [4]


def damaged(at: Path, how: str) -> None:
    if how == "deleted":
        at.unlink()
    else:
        data = bytearray(at.read_bytes())
        data[len(data) // 2] ^= 1
        at.write_bytes(data if how == "flipped" else data[:-1])


@pytest.mark.parametrize("how", ["deleted", "flipped", "cut off"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.pt", "plan.yaml", "manifest.json"])
def test_damage_is_told_with_what_is_left(name, how, run):
    damaged(run / "step-00000002" / name, how)
    result = meshwright("inspect", run / "step-00000002", code=2)
    assert "damaged" in result.stdout and name in result.stderr
    assert ("layers.{0…2}" in result.stdout) == (name not in (".metadata", "manifest.json"))
    if name.endswith("distcp"):
        assert any(kind in result.stderr for kind in ("model.", "optimizer.", "rng."))
    text = meshwright("inspect", run, code=2).stdout
    assert "whole" in text.splitlines()[1] and "damaged" in text.splitlines()[2]


def test_sizes_alone_are_quick_and_say_so(run):
    damaged(run / "step-00000002" / "__0_0.distcp", "flipped")
    assert "sizes" in meshwright("inspect", run / "step-00000002", "--quick").output
    damaged(run / "step-00000002" / "__1_0.distcp", "cut off")
    assert "__1_0" in meshwright("inspect", run, "--quick", code=2).stderr


def test_where_there_is_none(tmp_path):
    assert "no such directory" in meshwright("inspect", tmp_path / "no", code=2).stderr
    assert "no checkpoint in it" in meshwright("inspect", tmp_path, code=2).stderr


def test_of_a_plain_process(tmp_path):
    save_checkpoint(tmp_path, Net(), step=7)
    assert "one process" in meshwright("inspect", tmp_path).output


def test_export_on_the_command_line(run, tmp_path):
    text = meshwright("export", run, tmp_path / "out", "--shard-size", "300").output
    assert "step 2" in text and "9 tensors" in text and "no config.json" in text
    assert set(open_folder(tmp_path / "out")) == set(Net().state_dict())
    assert "exists already" in meshwright("export", run, tmp_path / "out", code=2).stderr
