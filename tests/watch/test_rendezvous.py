"""Processes of one start meet, whatever those of an earlier start left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.watch.rendezvous import fresh_store


def start(store, ranks, here=None):
    """The stores that the ranks of a start get; ``here``: those that come."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(
            pool.map(lambda rank: fresh_store(store, rank, ranks, 10.0), range(ranks) if here is None else here)
        )


def test_ranks_of_a_start_share_a_store_and_find_nothing_of_earlier_ones():
    store = dist.HashStore()
    for number in range(3):
        found = start(store, 4)
        assert not any(s.check(["address"]) for s in found)
        found[3].set("address", str(number))
        found[0].set_timeout(timedelta(seconds=5))
        assert found[0].get("address") == str(number).encode()


def test_numbers_of_a_start_that_never_met_are_not_taken():
    store = dist.HashStore()
    table = dist.PrefixStore("meshwright", store)
    for rank in range(3):
        table.set(f"here/{rank}", f"dead {rank}")
    table.set("offer", '["dead", ["dead 0", "dead 1", "dead 2"]]')
    table.set("go/dead", "")
    first, *others = start(store, 3)
    first.set("met", "yes")
    assert all(s.get("met") == b"yes" for s in others) and not dist.PrefixStore("dead", store).check(["met"])


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said():
    with pytest.raises(TimeoutError, match="not all of 3 ranks"):
        fresh_store(dist.HashStore(), 0, 3, 0.2)
