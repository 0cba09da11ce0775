"""The examples, run as a person runs them; and the documents' own cases, with their numbers written out."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, workers: LocalWorkers) -> Iterator[object]:
    """Loads an example; it uses the tests' workers instead of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(mw, "local_workers", lambda ranks: nullcontext(workers))
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return importlib.import_module(name)

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", FILES)
def test_every_example_says_what_it_is_about_and_is_short(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert 'if __name__ == "__main__":' in text
    assert len(text.splitlines()) <= 140


# --- (a) meshes of 2 × 3 and 3 × 2 ------------------------------------------------------------------------------------


def test_who_is_with_whom_on_meshes_of_2_by_3_and_3_by_2(
    example: object, capsys: pytest.CaptureFixture[str], workers: LocalWorkers
) -> None:
    module = example("mesh")  # type: ignore[operator]
    module.main()
    told = capsys.readouterr().out
    assert "rank 4:  dp_shard 1 of [1, 4]   tp 1 of [3, 4, 5]" in told
    assert "rank 4:  dp_shard 2 of [0, 2, 4]   tp 0 of [4, 5]" in told
    wide, tall = mw.Mesh.parse("dp_shard=2,tp=3"), mw.Mesh.parse("dp_shard=3,tp=2")
    assert wide.groups("tp") == [[0, 1, 2], [3, 4, 5]] and wide.groups("dp_shard") == [[0, 3], [1, 4], [2, 5]]
    assert tall.groups("tp") == [[0, 1], [2, 3], [4, 5]] and tall.groups("dp_shard") == [[0, 2, 4], [1, 3, 5]]


# --- (b) weights of 101 … ---------------------------------------------------------------------------------------------

# What the document prints for HSDP, and what FSDP × tp must hold: tp cuts rows of the weight first, FSDP what is left.
FIRST_AND_LAST = {
    "HSDP on 2 × 4": [(101, 125), (126, 150), (151, 175), (176, 200)] * 2,
    "FSDP × tp on 2 × 4": [
        (101, 124), (137, 160), (173, 196), (209, 232), (125, 136), (161, 172), (197, 208), (233, 244),
    ],
    "10 rows over 3 × 2": [(101, 108), (121, 128), (109, 116), (129, 136), (117, 120), (137, 140)],
}  # fmt: skip


@pytest.mark.parametrize("case", FIRST_AND_LAST)
def test_each_rank_holds_the_documents_numbers_and_the_whole_comes_back_in_order(
    case: str, example: object, workers: LocalWorkers
) -> None:
    module = example("who_holds_what")  # type: ignore[operator]
    expected = FIRST_AND_LAST[case]
    found = workers.run(module.held, case, ranks=len(expected))
    for (_, name, local, full, state), (first, last) in zip(found, expected, strict=True):
        assert local.flatten().tolist() == list(range(first, last + 1))
        assert full.flatten().tolist() == list(range(101, 101 + full.numel()))
        assert not state or torch.equal(state[name], full)
    assert found[0][-1], "rank 0 has the whole state"


def test_what_each_rank_holds_is_what_the_map_says(
    example: object, capsys: pytest.CaptureFixture[str], workers: LocalWorkers
) -> None:
    example("who_holds_what").main()  # type: ignore[operator]
    told = capsys.readouterr().out
    assert "rank 6 holds 50:75: 151 … 175" in told
    assert told.count("the whole comes back in order") == 3


# --- (c) column, row, pairwise; column → row → whole ------------------------------------------------------------------


def test_column_row_and_pairwise_cuts_and_a_tensor_moved_between_them(
    example: object, capsys: pytest.CaptureFixture[str], workers: LocalWorkers
) -> None:
    module = example("cuts")  # type: ignore[operator]
    module.main()
    told = capsys.readouterr().out
    pair = "up.weight (16, 8) Shard(0), down.weight (8, 16) Shard(1)\n  a step: 1 all_reduce;"
    assert f"pairwise:\n  {pair}" in told
    assert f"left to be found:\n  {pair}" in told
    assert "(8, 9) → (4, 18) → (8, 18)" in told
    shapes, calls = workers.run(module.redistributed, 888, 1888, ranks=2)[1]  # the slides' size
    assert shapes == [(888, 944), (444, 1888), (888, 1888)] and calls == {"all_to_all": 1, "all_gather": 1}


UNEVEN = {2: [[(7, 3), (4, 5)], [(7, 2), (3, 5)]], 3: [[(7, 2), (3, 5)], [(7, 2), (3, 5)], [(7, 1), (1, 5)]]}


@pytest.mark.parametrize("ranks", UNEVEN)
def test_a_tensor_in_uneven_shares_is_moved_from_column_to_row_to_whole(
    ranks: int, example: object, workers: LocalWorkers
) -> None:
    module = example("cuts")  # type: ignore[operator]
    for rank, (shapes, calls) in enumerate(workers.run(module.redistributed, 7, 5, ranks=ranks)):
        assert shapes == [*UNEVEN[ranks][rank], (7, 5)]
        assert calls == {"all_to_all": 1, "all_gather": 1}


# --- (d) a ViT on digits ----------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_vit_learns_digits_data_and_tensor_parallel(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert example("vit_digits").main(steps=40, least=0.7) > 0.7  # type: ignore[operator]
    assert "PASSED  dp_shard=2 × tp=2 is one device" in capsys.readouterr().out


# --- (e) DDP for one block, FSDP for another --------------------------------------------------------------------------


def test_one_block_replicated_and_one_sharded(
    example: object, capsys: pytest.CaptureFixture[str], workers: LocalWorkers
) -> None:
    module = example("two_blocks")  # type: ignore[operator]
    module.main()
    assert capsys.readouterr().out.count("PASSED") == len(module.PLANS)
    plan = module.PLANS["block_a DDP, block_b FSDP"]
    shards = mw.shard_map(mw.make_recipe(module.Foo, plan, {"x": torch.zeros(8, 256)}, module.loss))
    assert shards.held_by("block_a.weight") == (((0, 1, 2, 3), (((0, 32),), ((0, 256),))),)
    assert [ranks for ranks, _ in shards.held_by("block_b.0.weight")] == [(0,), (1,), (2,), (3,)]


# --- (f) two blocks at the same time ----------------------------------------------------------------------------------


def test_two_blocks_run_at_the_same_time_on_ranks_of_their_own(
    example: object, capsys: pytest.CaptureFixture[str], workers: LocalWorkers
) -> None:
    module = example("branches")  # type: ignore[operator]
    module.main()  # asserts that the losses are those of one device
    told = capsys.readouterr().out
    assert told.count("ranks 0–7 ─ fork ─┬─ 0, 1  foo.block_a ─┬─ join") == 2
    assert all(told.count(f"rank {rank} runs foo.block_{'a' if rank < 2 else 'b'}") == 2 for rank in range(8))
    # 12 × 32 results in float32: ranks 0 and 1 send theirs to six others in turn; 12 × 256 gradients meet at the fork
    assert "rank 0 runs foo.block_a; a step: 4608 bytes to the join, 12288 of gradients to the fork" in told
    # of the six, 0 and 1 lack block_b's results: two ranks send them, or six the shares of three
    assert told.count("rank 2 runs foo.block_b; a step: 1536 bytes") == 2
    assert [f"rank 7 runs foo.block_b; a step: {sent} bytes" in told for sent in (0, 1536)] == [True, True]


# --- FSDP alone and with tensor parallelism, predicted ----------------------------------------------------------------


@pytest.mark.proof  # half a minute
def test_120_billion_parameters_fit_with_both_axes_alone(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    example("vit_60b").main()  # type: ignore[operator]
    lines = capsys.readouterr().out.splitlines()
    fits = {tuple(line.split()[:2]): line.split()[-1] for line in lines if line.startswith(("60B ", "120B "))}
    assert fits == {("60B", "FSDP"): "yes", ("60B", "2-D"): "yes", ("120B", "FSDP"): "no", ("120B", "2-D"): "yes"}
    ratios = [float(line.split()[-1]) for line in lines if line.startswith("one layer")]
    assert 1 < ratios[0] < ratios[1]  # parameters weigh more where the batch is smaller


# --- the demo and the script ------------------------------------------------------------------------------------------


@pytest.mark.proof  # a minute
def test_the_demo_learns_and_is_the_same_as_one_device(example: object) -> None:
    assert example("demo").main() == 0  # type: ignore[operator]


@pytest.mark.proof  # 8 processes, twice; `make demo` itself is run by people
def test_the_demo_fails_where_nothing_was_learnt_and_still_checks(
    example: object, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert example("demo").main(steps=2) == 1  # type: ignore[operator]
    told = capsys.readouterr().out
    assert "PASSED  pp=2 × dp_shard=2 × tp=2 is one device" in told
    assert "Not learnt, same as one device" in told
    end = told.partition("mesh: auto would have chosen")[2]
    assert "predicted" in end and "measured" in end and "microbatches: " in end


def _script(*command: str) -> subprocess.CompletedProcess[str]:
    root = EXAMPLES.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path])}
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.proof  # runs under torchrun are tried in tests/run, with a rank that is killed
def test_the_script_trains_under_torchrun() -> None:
    pytest.importorskip("transformers")
    run = _script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "examples/train.py")
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.2


@pytest.mark.proof
def test_the_script_alone_says_how_to_start_it() -> None:
    pytest.importorskip("transformers")
    run = _script("examples/train.py")
    assert run.returncode != 0
    assert "torchrun --nproc-per-node 4 examples/train.py" in run.stderr


# --- a script of one's own, recorded ----------------------------------------------------------------------------------


def test_a_script_of_ones_own_is_recorded_and_compared(example: object, workers: LocalWorkers, tmp_path: Path) -> None:
    module = example("record")  # type: ignore[operator]
    module.train(tmp_path / "one")
    assert not (tmp_path / "one" / "gradients-2.safetensors").exists()
    workers.run(module.train, tmp_path / "two", ranks=2)
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "two").passed
    workers.run(module.train, tmp_path / "wrong", True, ranks=2)
    assert mw.compare_recordings(tmp_path / "one", tmp_path / "wrong").keys() == ["averaged_twice"]
