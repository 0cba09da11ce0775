"""``meshwright compare``: a verdict on the terminal, as data, and as an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scripts
import torch
from torch import Tensor, nn

import meshwright as mw
from commands import meshwright


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Recordings: one process, the same under a prefix, and one whose gradients are half as large."""
    for name, factor, prefixed in (("one", 1.0, False), ("prefixed", 1.0, True), ("half", 0.5, False)):
        model = scripts.net()
        outer = nn.ModuleDict({"model": model}) if prefixed else model
        optimizer, (x, y) = scripts.adam(outer), scripts.batch()
        with mw.record(outer, tmp_path / name, optimizer=optimizer, mesh={"dp": 2}) as rec:
            loss: Tensor = nn.functional.cross_entropy(model(x), y)
            (factor * loss).backward()
            rec.loss(loss, batch=(x, y))
            optimizer.step()
    return tmp_path


def test_what_is_the_same(folder: Path) -> None:
    told = meshwright("compare", folder / "one", folder / "one").output
    assert "PASSED  both computed the same" in told and "FAILED" not in told
    assert "gradients" in told and "look for" not in told


def test_what_is_not(folder: Path) -> None:
    told = " ".join(meshwright("compare", folder / "one", folder / "half", code=1).output.split())
    assert "gradients 14 of 14: layers.{0…1}.norm.weight" in told
    assert "0.5 × is one part in 2, the size of dp=2: averaged once too often" in told
    assert "look for: loss / world_size before backward" in told
    assert "and 8 more: --all" in told and "docs/check_your_own.md" in told
    assert "layers.1.down.bias" in meshwright("compare", folder / "one", folder / "half", "--all", code=1).output


def test_data(folder: Path) -> None:
    told = json.loads(meshwright("compare", folder / "one", folder / "half", "--json", code=1).output)
    assert not told["passed"] and told["judged"]["gradients"] == {"compared": 14, "right": 0}
    [cause] = told["causes"]
    assert cause["key"] == "averaged_twice"
    assert [wrong["factor"] for wrong in cause["wrong"]] == pytest.approx([0.5] * 14)


def test_names_are_mapped(folder: Path) -> None:
    assert "names_missing" in meshwright("compare", folder / "one", folder / "prefixed", code=1).output
    meshwright("compare", folder / "one", folder / "prefixed", "--map", r"^model\.=")


def test_mistakes_are_told_at_once(folder: Path) -> None:
    told = meshwright("compare", folder / "one", folder / "half", "--map", "(=", "--map", "prefix", code=2).output
    assert "2 problems" in told and "a regular expression" in told and "REGEX=TEXT" in told
    told = meshwright("compare", folder / "one", folder / "none", code=2).output
    assert "no such folder" in told
    (folder / ".none.recording").mkdir()
    assert "begun and never completed" in meshwright("compare", folder / "one", folder / "none", code=2).output
    (folder / "one" / "manifest.json").write_text("{")
    assert "damaged" in meshwright("compare", folder / "one", folder / "half", code=2).output


def test_a_recording_with_a_file_cut_off_is_told(folder: Path) -> None:
    file = folder / "half" / "gradients-1.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "gradients-1.safetensors" in meshwright("compare", folder / "one", folder / "half", code=2).output


def test_values_are_those_of_the_run(folder: Path) -> None:
    """What is printed as half is half."""
    from meshwright.recording.folder import RecordingFolder

    one, half = (
        RecordingFolder.open(folder / name).views("gradients-1", "head.weight")[0].value for name in ("one", "half")
    )
    assert one is not None and half is not None
    torch.testing.assert_close(half, one / 2, rtol=1e-12, atol=0)
