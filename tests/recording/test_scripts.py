"""Scripts that are right, and scripts that are broken on purpose: each flaw is found, and called by its name.

They are FSDP2, DDP and DTensor's tensor parallelism, all on two ranks, and recorded in one run of the workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import scripts

import meshwright as mw
from meshwright.recording.verdict import ExplainedDifferences
from meshwright.workers.pool import LocalWorkers

TENSORS = 14

# (wrap, flaw) → causes, each with how many it is about
FOUND: dict[tuple[str, str], dict[str, int]] = {
    ("ddp", ""): {},
    ("fsdp", ""): {},
    ("tp", ""): {},
    ("tp", "summed by hand"): {},
    ("ddp", "scaled up"): {"summed_over_data": TENSORS},
    ("fsdp", "scaled up"): {"summed_over_data": TENSORS},
    ("ddp", "scaled down"): {"averaged_twice": TENSORS},
    ("fsdp", "odd"): {"scaled_alike": TENSORS},
    ("ddp", "no_sync"): {"unaveraged": TENSORS},
    ("ddp", "uneven"): {"mean_of_means": TENSORS},
    ("ddp", "skipped row"): {"rows_missing": 1, "loss_differs": 1, "other_rows": TENSORS},
    ("fsdp", "same rows"): {"rows_missing": 1, "loss_differs": 1, "other_rows": TENSORS},
    ("tp", "missing sum"): {"summands": 4},
    ("tp", "whole once more"): {"counted_over_tensor": 4},
    ("fsdp", "swapped shards"): {"order": 1},
    ("fsdp", "reduced twice"): {"block_sums": 1},
    ("fsdp", "stale gradient"): {"block_zeros": 1},
    ("fsdp", "own scale"): {"block_scaled": 1},
    ("fsdp", "noise on a shard"): {"block_wrong": 1},
    ("ddp", "one rank alone"): {"some_ranks": 1},
    ("ddp", "none on one rank"): {"none_on_ranks": 1},
    ("fsdp", "negated"): {"negated": 1},
    ("ddp", "detached"): {"none": 1},
    ("fsdp", "zeroed"): {"zeros": 1},
    ("ddp", "nan"): {"not_finite": 1},
    ("fsdp", "decay"): {"settings": 1, "update_other": 12},
    ("ddp", "rate"): {"settings": 1, "update_scaled": TENSORS},
    ("fsdp", "frozen shard"): {"settings": 1, "stale_shard": TENSORS},
    ("ddp", "rate of a rank"): {"settings": 1, "update_replicas": TENSORS},
    ("fsdp", "swapped update"): {"update_order": 1},
    ("ddp", "undone update"): {"not_updated": 1},
    ("fsdp", "other"): {"other": 1},
    ("ddp", "each its own"): {"replicas": 1},
    ("ddp", "another loss"): {"loss_scaled": 1},
    ("tp", "averaged by tensor ranks"): {"divided_over_tensor": 2},
    ("ddp", "other weights"): {"weights_differ": 1, "loss_differs": 1},
    ("fsdp", "stale weights"): {"weights_blocks": 1, "loss_differs": 1, "other_weights": TENSORS},
}
SPLIT = ("tp", "rows of data ranks")


def folder_of(wrap: str, flaw: str) -> str:
    return f"{wrap} {flaw}".strip().replace(" ", "-")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, workers: LocalWorkers) -> Path:
    """A folder with the recording of one process, and one of each script."""
    path = tmp_path_factory.mktemp("recordings")
    scripts.one(path / "one")
    runs = [*FOUND, SPLIT]
    raised = workers.run(scripts.all_of, path, [(*case, folder_of(*case)) for case in runs], ranks=2)
    assert raised[0] == [""] * len(runs)
    return path


@pytest.mark.parametrize(("wrap", "flaw"), FOUND)
def test_a_script_is_judged(wrap: str, flaw: str, recorded: Path) -> None:
    found = mw.compare_recordings(recorded / "one", recorded / folder_of(wrap, flaw))
    expected = FOUND[wrap, flaw]
    causes = {cause.key: len(cause.wrong) for cause in found.causes if not _consequence(cause, expected)}
    assert causes == expected, str(found)
    assert bool(found) is not bool(expected)


def _consequence(cause: ExplainedDifferences, expected: dict[str, int]) -> bool:
    """What follows from other weights may be anything."""
    return cause.kind == "gradients" and cause.follows and "weights_differ" in expected


def test_all_that_is_right_was_looked_at(recorded: Path) -> None:
    found = mw.compare_recordings(recorded / "one", recorded / "fsdp")
    tensors = (TENSORS, TENSORS)
    assert found.judged == {
        "names": tensors, "weights": tensors, "rows": (1, 1), "settings": (1, 1), "loss": (1, 1), "gradients": tensors,
        "updates": tensors,
    }  # fmt: skip
    assert found.notes == ()


def test_a_gradient_of_the_step_before(tmp_path: Path, workers: LocalWorkers) -> None:
    """Gradients that nobody, or not every rank, sets to zero: the first step is right, the second one is not."""
    scripts.one(tmp_path / "one", steps=2)
    for flaw, key in (("never zeroed", "carried"), ("not zeroed", "block_carried")):
        workers.run(scripts.data_parallel, tmp_path / flaw, flaw, "fsdp", 2, ranks=2)
        found = mw.compare_recordings(tmp_path / "one", tmp_path / flaw)
        causes = [cause for cause in found.causes if cause.kind == "gradients"]
        assert found.steps == 2 and causes[0].key == key and len(causes[0].wrong) >= TENSORS - 2, str(found)


def test_an_optimizer_made_before_the_model_was_wrapped(tmp_path: Path, workers: LocalWorkers) -> None:
    raised = workers.run(scripts.all_of, tmp_path, [("fsdp", "stale optimizer", "two")], ranks=2)
    assert all("no step of an optimizer that holds parameters of this model" in text for text in raised[0])
    assert not (tmp_path / "two").exists()


def test_a_sampler_that_divides_rows_among_tensor_parallel_ranks(recorded: Path) -> None:
    found = mw.compare_recordings(recorded / "one", recorded / folder_of(*SPLIT))
    first, *others = found.causes
    assert first.key == "rows_split" and first.wrong[0].name == "ranks 0, 1"
    assert others and all(cause.follows for cause in others)
