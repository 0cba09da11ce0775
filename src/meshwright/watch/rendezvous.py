"""A store for the processes of one start, if a launcher may have started ranks before.

torchrun keeps one store for all of its restarts, with the keys of earlier starts: a new rank may read the address of a dead
one and connect to it (pytorch issue 135712). The count of restarts does not distinguish starts, as each node has its own. So
the ranks of a start first agree on a new name, and write below it:

    rank r    here/r = its random number                sees its number in the offer ─► taken/<name>/r    go/<name> ─► done
    rank 0    reads here/… ─► offer = <name>, numbers   all ranks have taken it ─► go/<name>              else reads again

A key of a dead process is never used: a rank accepts only an offer with its own number.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import torch.distributed as dist

Store: TypeAlias = Any  # torch.distributed.Store, whose type torch does not export
# first and longest pause, in seconds, between two reads of the store: short at first, as ranks usually come together
_PAUSES = (0.01, 0.5)


def launched_store(timeout: timedelta) -> Store | None:
    """A store for this start within torchrun's store; None if torchrun keeps none. Collective."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, ranks, False, timeout)  # type: ignore[attr-defined]
    return fresh_store(store, rank, ranks, timeout.total_seconds())


def fresh_store(store: Store, rank: int, ranks: int, timeout: float) -> Store:
    """A store for this start, with a new prefix, within a store that earlier starts may have written to. Collective.

    Raises:
        TimeoutError: not all ranks have come within ``timeout`` seconds.
    """
    table = dist.PrefixStore("meshwright", store)  # type: ignore[attr-defined]
    number, deadline, pause = uuid4().hex, time.monotonic() + timeout, _PAUSES[0]
    table.set(f"here/{rank}", number)
    offer = _Offer("", [])
    while True:
        if rank == 0:
            offer = _renewed(table, offer, ranks)
        elif table.check(["offer"]):
            offer = _Offer(*json.loads(table.get("offer")))
        if offer.numbers[rank : rank + 1] == [number]:
            table.set(f"taken/{offer.name}/{rank}", "")
            if rank == 0 and table.check([f"taken/{offer.name}/{r}" for r in range(ranks)]):
                table.set(f"go/{offer.name}", "")
            if table.check([f"go/{offer.name}"]):
                return dist.PrefixStore(offer.name, store)  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: not all of {ranks} ranks came within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


class _Offer:
    """A name for a start, and the numbers of its ranks, in rank order. Rank 0 makes it."""

    def __init__(self, name: str, numbers: list[str]) -> None:
        self.name, self.numbers = name, numbers


def _renewed(table: Store, offer: _Offer, ranks: int) -> _Offer:
    """The offer, if the numbers of all ranks are still those in it; else a new offer, which is written to the store."""
    keys = [f"here/{rank}" for rank in range(ranks)]
    if not table.check(keys):
        return offer
    numbers = [table.get(key).decode() for key in keys]
    if numbers == offer.numbers:
        return offer
    offer = _Offer(uuid4().hex, numbers)
    table.set("offer", json.dumps([offer.name, numbers]))
    return offer
