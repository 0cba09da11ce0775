"""Ranks that start again meet each other, and nothing of those before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.run.rendezvous import agreed_run


def meet(store: Any, ranks: int, order: list[int] | None = None) -> set[str]:
    with ThreadPoolExecutor(ranks) as pool:
        runs = [pool.submit(agreed_run, store, rank, ranks, 20.0) for rank in order or range(ranks)]
        return {run.result() for run in runs}


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_each_attempt_agrees_on_a_run_of_its_own(order: list[int]) -> None:
    store, seen = dist.HashStore(), set[str]()
    for _ in range(5):
        runs = meet(store, 4, order)
        assert len(runs) == 1 and not runs & seen, "one, and none of an attempt before"
        seen |= runs


def test_a_rank_that_died_while_it_was_met_is_met_again() -> None:
    store = dist.HashStore()
    store.set("hello/1", "gone")
    store.set("welcome/1", "a-run-before gone")
    store.set("ack/1", "a-run-before")
    assert len(meet(store, 2) | {"a-run-before"}) == 2


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="ranks 1 2 did not come"):
        agreed_run(store, 0, 3, 0.1)
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        agreed_run(store, 1, 3, 0.1)
