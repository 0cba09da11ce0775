"""``tp_plan`` of transformers, by transformers: right, and broken on purpose."""

from __future__ import annotations

from pathlib import Path

import hugging_face
import pytest

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

pytest.importorskip("transformers.distributed.tensor_parallel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and the recording of one process."""
    path = tmp_path_factory.mktemp("hugging-face")
    hugging_face.saved(path / "model")
    hugging_face.alone(path / "model", path / "one")
    return path


@pytest.mark.parametrize(
    ("flaw", "first"),
    [
        ("", None),
        ("summed once more", "counted_over_tensor"),
        pytest.param("rows of data ranks", "rows_split", marks=pytest.mark.proof),
    ],
)
def test_its_own_plan(flaw: str, first: str | None, folder: Path, workers: LocalWorkers) -> None:
    workers.run(hugging_face.own_plan, folder / "model", folder / "two", flaw, ranks=2)
    found = mw.compare_recordings(folder / "one", folder / "two")
    assert (found.keys() or [None])[0] == first, str(found)
    assert found.judged["gradients"][0] == 21
    if first == "counted_over_tensor":
        assert found.keys() == [first]
        assert (
            found.causes[0].names
            == "model.layers.{0…1}.input_layernorm.weight, model.layers.{0…1}.post_attention_layernorm.weight"
        )


@pytest.mark.proof
def test_its_own_plan_at_loading(folder: Path, workers: LocalWorkers) -> None:
    pytest.importorskip("accelerate")
    workers.run(hugging_face.own_plan, folder / "model", folder / "two", loads=True, ranks=2)
    found = mw.compare_recordings(folder / "one", folder / "two")
    assert found.passed, str(found)
