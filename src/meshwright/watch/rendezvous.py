"""Where the processes of one start meet, when a launcher has started them before.

torchrun keeps one store for all of its restarts, with what the ranks of earlier ones wrote: a new rank may connect to the
address of a dead one (pytorch issue 135712). Its count of restarts does not tell starts apart, as each node has its own. So
they first agree on a name that only they know, and write below it:

    rank r    here/r = a number of its own              sees itself in the offer ─► taken/<name>/r     go/<name> ─► meets
    rank 0    reads here/… ─► offer = <name>, numbers   all have taken it ─► go/<name>                 else reads again

What a dead process left is never taken: no one takes an offer without his own number.
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
_PAUSES = (0.01, 0.5)  # seconds between two looks: the first, the longest


def launched_store(timeout: timedelta) -> Store | None:
    """A store of this start's own in the one that torchrun keeps; None where torchrun keeps none. Collective."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(where, port, ranks, False, timeout)  # type: ignore[attr-defined]
    return fresh(store, rank, ranks, timeout.total_seconds())


def fresh(store: Store, rank: int, ranks: int, timeout: float) -> Store:
    """Below a store in which earlier starts have written, one of this start's own. Collective.

    Raises TimeoutError where not all ranks have come in ``timeout`` seconds.
    """
    table = dist.PrefixStore("meshwright", store)  # type: ignore[attr-defined]
    number, deadline, pause = uuid4().hex, time.monotonic() + timeout, _PAUSES[0]
    table.set(f"here/{rank}", number)
    offered = _Offer("", [])
    while True:
        if rank == 0:
            offered = _renewed(table, offered, ranks)
        elif table.check(["offer"]):
            offered = _Offer(*json.loads(table.get("offer")))
        if offered.ranks[rank : rank + 1] == [number]:
            table.set(f"taken/{offered.name}/{rank}", "")
            if rank == 0 and table.check([f"taken/{offered.name}/{r}" for r in range(ranks)]):
                table.set(f"go/{offered.name}", "")
            if table.check([f"go/{offered.name}"]):
                return dist.PrefixStore(offered.name, store)  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: not all of {ranks} ranks came within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


class _Offer:
    """A name, and the numbers of the ranks that it is for; of rank 0's making."""

    def __init__(self, name: str, ranks: list[str]) -> None:
        self.name, self.ranks = name, ranks


def _renewed(table: Store, offered: _Offer, ranks: int) -> _Offer:
    """The same offer while the same processes are here, else another."""
    keys = [f"here/{rank}" for rank in range(ranks)]
    if not table.check(keys):
        return offered
    numbers = [table.get(key).decode() for key in keys]
    if numbers == offered.ranks:
        return offered
    offered = _Offer(uuid4().hex, numbers)
    table.set("offer", json.dumps([offered.name, numbers]))
    return offered
