"""``mw.launch``: a function on several local ranks, in one line, as a notebook calls it."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.workers.pool import LocalWorkers, WorkerError


@pytest.fixture
def kept(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of the session stand in for those that a launch would start."""
    monkeypatch.setattr("meshwright.workers.pool.local_workers", lambda *_, **__: nullcontext(workers))


def test_it_gives_what_rank_0_returned_and_shows_what_it_printed(capsys: pytest.CaptureFixture[str]) -> None:
    started = os.getpid()

    def total(of: int, *, more: int) -> tuple[int, int]:  # nested, as in a notebook's cell
        value = torch.tensor(of + more * dist.get_rank())
        print(f"here is rank {dist.get_rank()}")
        dist.all_reduce(value)
        assert os.getpid() != started
        return int(value), dist.get_rank()

    assert mw.launch(total, 1, more=10, nprocs=2) == (12, 0)
    assert capsys.readouterr().out == "here is rank 0\n"


def test_it_gives_what_every_rank_returned_if_asked_to(kept: None) -> None:
    assert mw.launch(lambda: dist.get_rank(), nprocs=3, every=True) == [0, 1, 2]


def test_a_job_is_made_and_trained_in_it(kept: None) -> None:
    def losses() -> list[float]:
        batch = {"input": torch.ones(4, 3)}
        job = mw.parallelize(lambda: torch.nn.Linear(3, 4), {"mesh": {"dp_shard": 2}}, batch=batch, loss=torch.mean)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        told = []
        for _ in range(2):
            told.append(float(job.step({"input": torch.ones(2, 3)})))
            optimizer.step()
            optimizer.zero_grad()
        return told

    first, second = mw.launch(losses, nprocs=2)
    assert second < first


def test_an_error_says_which_rank_it_was(kept: None) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such thing")
        dist.barrier()

    with pytest.raises(WorkerError, match="rank 1 of 2 failed: KeyError: 'no such thing'") as error:
        mw.launch(fail, nprocs=2)
    assert error.value.rank == 1


def test_a_mistake_in_a_plan_is_told_as_one(kept: None) -> None:
    def wrong() -> None:
        mw.parallelize(lambda: torch.nn.Linear(3, 4), {"mesh": {"tpp": 2}}, batch=torch.ones(2, 3))

    with pytest.raises(mw.PlanError, match="the axis tpp"):
        mw.launch(wrong, nprocs=2)
