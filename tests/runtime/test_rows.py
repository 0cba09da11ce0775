"""Rows of a dataset: the same in every layout, read here or ahead by other processes, and after a resume."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

import meshwright as mw
from meshwright.workers.pool import LocalWorkers, WorkerError

ROWS = 21


class Noisy:
    """A dataset that draws random numbers for each of its rows, from every generator."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = [*torch.rand(2).tolist(), random.random(), numpy.random.rand()]
        here = get_worker_info() is None
        return {"x": torch.tensor([float(i), *drawn], dtype=torch.float64), "here": here}


class Dies(Noisy):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(5, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor, here: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).square().mean()


def made(plan: str) -> mw.Job:
    batch = {"x": torch.zeros(8, 5, dtype=torch.float64), "here": torch.zeros(8, dtype=torch.bool)}
    return mw.parallelize(Dropped, plan, batch=batch, loss=itself, dtype=torch.float64)


def itself(loss: Tensor) -> Tensor:
    return loss


def read(plan: str, num_workers: int, start: int = 0) -> tuple[list[Tensor], set[bool]]:
    """The rows of two epochs that this rank gets, and where they were read."""
    found = list(made(plan).batches(Noisy(), 8, epochs=2, seed=4, start=start, uneven=True, num_workers=num_workers))
    return [batch["x"] for batch in found], {bool(h) for batch in found for h in batch["here"]}


def whole(of_ranks: list[tuple[list[Tensor], set[bool]]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*(rows for rows, _ in of_ranks), strict=True)]


def test_rows_and_what_is_drawn_for_them_are_the_same_however_they_are_read(workers: LocalWorkers) -> None:
    expected = whole(workers.run(read, "tp=1", 0, ranks=1))
    assert [len(rows) for rows in expected] == [8, 8, 5] * 2
    for epoch in range(2):
        rows = torch.cat(expected[3 * epoch : 3 * epoch + 3])
        assert sorted(rows[:, 0].tolist()) == list(range(ROWS))
    first, second = (torch.cat(expected[i : i + 3]) for i in (0, 3))
    assert not torch.equal(first[first[:, 0].argsort()], second[second[:, 0].argsort()])  # drawn anew in each epoch
    assert len({row[1].item() for row in (*first, *second)}) == 2 * ROWS
    for plan, ranks, num_workers in (("tp=1", 1, 2), ("dp_shard=2", 2, 1), ("dp_shard=2", 2, 0)):
        found = workers.run(read, plan, num_workers, ranks=ranks)
        torch.testing.assert_close(whole(found), expected, rtol=0, atol=0)
        assert [here for _, here in found] == [{num_workers == 0}] * ranks
    (a, _), (b, _) = workers.run(read, "tp=2", 2, ranks=2)  # ranks that run the same rows
    torch.testing.assert_close([a, b], [expected, expected], rtol=0, atol=0)
    resumed, _ = workers.run(read, "tp=1", 2, 4, ranks=1)[0]
    torch.testing.assert_close(resumed, expected[4:], rtol=0, atol=0)


def no_rows(num_workers: int) -> list[tuple[int, ...]]:
    job = made("dp_shard=4")
    data = job.batches(torch.utils.data.Subset(Noisy(), range(9)), 8, uneven=True, num_workers=num_workers)
    return [tuple(batch["x"].shape) for batch in data]


def test_a_share_without_rows_has_the_shape_of_one(workers: LocalWorkers) -> None:
    for num_workers in (0, 1):
        assert sorted(workers.run(no_rows, num_workers, ranks=4)) == [[(2, 5), (0, 5)]] * 3 + [[(2, 5), (1, 5)]]


def losses(num_workers: int) -> tuple[list[float], dict[str, int]]:
    job = made("dp_shard=2")
    data = job.batches(Noisy(), 8, drop_last=True, num_workers=num_workers)
    return [job.step(batch).item() for batch in data], data.state_dict()


def stopped(num_workers: int) -> dict[str, int]:
    data = made("tp=1").batches(Noisy(), 8, epochs=None, num_workers=num_workers)
    for _, _ in zip(range(5), data, strict=False):
        pass
    return data.state_dict()


def test_reading_ahead_changes_neither_what_the_model_draws_nor_where_a_run_stands(workers: LocalWorkers) -> None:
    assert workers.run(losses, 0, ranks=2) == workers.run(losses, 2, ranks=2)
    assert workers.run(stopped, 0, ranks=1) == workers.run(stopped, 2, ranks=1)  # though more has been read


def dying() -> None:
    list(made("tp=1").batches(Dies(), 8, num_workers=2))


def test_a_process_that_reads_and_dies_is_an_error(workers: LocalWorkers) -> None:
    with pytest.raises(WorkerError, match="DataLoader worker"):
        workers.run(dying, ranks=1, timeout=60)


def test_no_batch_is_no_batch(workers: LocalWorkers) -> None:
    assert workers.run(count_of_none, ranks=1) == [0]


def count_of_none() -> int:
    return len(list(made("tp=1").batches(Noisy(), ROWS + 1, epochs=None, drop_last=True)))


def resumed(**changed: Any) -> list[str]:
    """The fixes, if a position is loaded in data with other arguments."""
    job = made("dp_shard=2")
    arguments = {"dataset": torch.zeros(20, 5), "global_batch": 8, "seed": 4, "shuffle": True, "drop_last": True}
    state = job.batches(**arguments).state_dict()
    try:
        job.batches(**(arguments | changed)).load_state_dict(state)
    except mw.PlanError as error:
        return [finding.fix for finding in error.findings]
    return []


def test_a_position_is_not_taken_for_one_in_another_order(workers: LocalWorkers) -> None:
    assert workers.run(resumed, ranks=2) == [[], []]
    everything = {"dataset": torch.zeros(21, 5), "global_batch": 4, "seed": 5, "shuffle": False, "drop_last": False}
    fixes = ["load without data=", "global_batch=8", "seed=4", "shuffle=True", "drop_last=True"]
    assert workers.run(partial(resumed, **everything), ranks=2) == [fixes, fixes]
