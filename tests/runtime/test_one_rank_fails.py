"""An error that one rank alone meets ends the job on all ranks, soon, each with an error that says which rank failed, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

SOON = 20.0  # seconds: less than any timeout of a collective, more than a busy machine takes


class Fails(nn.Module):
    """Raises in its forward, or in its backward, on the rank that is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x).relu()
            if i == 1 and self.where == "backward" and x.requires_grad:
                x.register_hook(_raises)
        return x.square().mean()


def _raises(*_: Any) -> None:
    raise ValueError("a bad row")


def rows_of_all() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def outcome(mesh: str, where: str, failing: int) -> tuple[str, str, float, str]:
    """The error of this rank's step, how long it took to come, and what the next step says."""
    rows = rows_of_all()
    job = mw.parallelize(Fails, {"mesh": mesh, "microbatches": 2}, batch={"x": rows}, loss=lambda y: y)
    job.step({"x": rows})
    if job.rank == failing:
        if where == "forward":
            job.module.blocks[3 if "pp" in mesh else 1].register_forward_hook(_raises)
        else:
            job.module.where = where
    began = time.monotonic()
    try:
        job.step({"x": rows})
    except Exception as error:
        took = time.monotonic() - began
        with pytest.raises(mw.RankError) as again:
            job.step({"x": rows})
        if job.rank == failing:
            time.sleep(5)  # it lives on: the others do not learn of its end by that
        return type(error).__name__, str(error), took, str(again.value)
    return "", "", 0.0, ""


@pytest.mark.parametrize(
    ("mesh", "where"),
    [
        pytest.param("dp_shard=2", "forward", marks=pytest.mark.proof),  # as in a backward
        pytest.param("tp=2", "forward", marks=pytest.mark.proof),
        ("pp=2", "forward"),
        pytest.param("dp_shard=2", "backward", marks=pytest.mark.proof),
    ],
)
def test_a_rank_that_fails_and_lives_on_ends_the_others(workers: LocalWorkers, mesh: str, where: str) -> None:
    outcomes = workers.run(outcome, mesh, where, 1, ranks=2, timeout=60)
    names = [name for name, *_ in outcomes]
    assert names in (["RankError", "ValueError"], ["RankError", "StageError"]), outcomes
    assert outcomes[0][2] < SOON
    assert "step 2: rank 1 failed: " in outcomes[0][1]
    assert "a bad row" in outcomes[0][1]
    assert all("takes no further step" in again for *_, again in outcomes)


class Rows:
    """A dataset with a row that cannot be read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i == 9:
            raise OSError("row 9 cannot be read")
        return {"x": torch.ones(8)}


def reads() -> tuple[str, str]:
    job = mw.parallelize(Fails, "dp_shard=2", batch={"x": torch.ones(4, 8)}, loss=lambda y: y)
    try:
        for batch in job.batches(Rows(), 4, shuffle=False):
            job.step(batch)
    except Exception as error:
        if isinstance(error, OSError):
            time.sleep(5)
        return type(error).__name__, str(error)
    return "", ""


def test_a_row_that_one_rank_cannot_read_ends_the_others(workers: LocalWorkers) -> None:
    told = workers.run(reads, ranks=2, timeout=60)
    assert {name for name, _ in told} == {"OSError", "RankError"}
    assert "row 9 cannot be read" in next(text for name, text in told if name == "RankError")


def interrupted(who: int) -> tuple[str, str]:
    rows = rows_of_all()
    job = mw.parallelize(Fails, "dp_shard=2", batch={"x": rows}, loss=lambda y: y)
    if job.rank == who:
        job.module.blocks[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        job.step({"x": rows})
    except BaseException as error:
        if job.rank == who:
            time.sleep(5)
        return type(error).__name__, str(error)
    return "", ""


def test_an_interrupt_of_one_rank_ends_the_others(workers: LocalWorkers) -> None:
    told = workers.run(interrupted, 0, ranks=2, timeout=60)
    assert told[0][0] == "KeyboardInterrupt"
    assert told[1][0] == "RankError" and "rank 0 failed: KeyboardInterrupt" in told[1][1]


KILLED = """
import os, signal, sys, time
import torch, torch.distributed as dist
import meshwright as mw

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()

rank, folder, mesh = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
rows = torch.ones(6, 8)
job = mw.parallelize(Model, mesh, batch={"x": rows}, loss=lambda y: y)
job.step({"x": rows})
if rank == 1:
    job.module.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
job.step({"x": rows})
"""


@pytest.mark.parametrize("mesh", ["dp_shard=3", pytest.param("pp=3", marks=pytest.mark.proof)])
def test_a_rank_that_is_killed_in_a_step_is_named_by_the_others(mesh: str, tmp_path: Path) -> None:
    """In a script of a person's own, which nothing watches."""
    commands = [[sys.executable, "-c", KILLED, str(rank), str(tmp_path), mesh] for rank in range(3)]
    ranks = [subprocess.Popen(c, env=dict(os.environ), stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL, 1], said
    for text in (said[0], said[2]):
        assert "RankError: step 2: rank 1 ended without a word" in text
