"""Rows that ranks send each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.runtime.rows.batch import has_rows, with_shared
from meshwright.runtime.rows.collectives import broadcast_batch
from meshwright.workers.pool import LocalWorkers

Facts = dict[str, Any]


def job() -> mw.Job:
    return mw.parallelize(lambda: nn.Linear(4, 4), "dp_shard=2", batch=(torch.zeros(4, 4),), loss=torch.sum)


def received(source: int, *, picklable: bool) -> tuple[Facts, Facts]:
    """(facts of the batch that this rank has after a broadcast, facts of its batch afterwards)."""
    groups = job().runner.groups
    rank = groups.rank
    batch = {
        "x": torch.full((2, 3), float(rank)).t().contiguous().t(),
        "image": torch.full((2, 1), float(rank), requires_grad=True),
        "classes": torch.full((2,), 10.0 + rank),  # weights of classes, with as many classes as rows
        "length": rank + 5,
        "call": len if picklable else lambda: None,
    }
    batch = with_shared(batch, ["classes"])
    copy = broadcast_batch(batch, source, groups)
    facts = {
        "values": [t[0].flatten()[0].item() for t in (copy["x"], copy["image"], copy["classes"])],
        "strides": copy["x"].stride(),
        "requires_grad": [copy[name].requires_grad for name in ("x", "image")],
        "has_rows": [has_rows(copy[name], 2) for name in ("x", "image", "classes")],
        "length": copy["length"],
    }
    copy["x"].zero_().sub_(1)  # not the memory of the batch
    return facts, {"x": batch["x"][0, 0].item(), "rank": rank}


@pytest.mark.parametrize("source", [0, 1])
def test_the_batch_of_one_rank_is_sent_with_its_constants_and_its_marks(source: int, workers: LocalWorkers) -> None:
    results = workers.run(received, source, picklable=True, ranks=2)
    expected = {
        "values": [source, source, 10.0 + source],
        "strides": (1, 2),
        "requires_grad": [False, True],
        "has_rows": [True, True, False],
        "length": source + 5,
    }
    assert results == [(expected, {"x": float(rank), "rank": rank}) for rank in range(2)]


def test_a_constant_that_cannot_be_pickled_stays_that_of_each_rank(workers: LocalWorkers) -> None:
    results = workers.run(received, 1, picklable=False, ranks=2)
    assert [facts["values"] for facts, _ in results] == [[1.0, 1.0, 11.0]] * 2
    assert [facts["length"] for facts, _ in results] == [5, 6]
