"""Where the ranks that torchrun started meet: a part of its store that no attempt before has written to.

    rank r      hello/r = its number of chance ──►             ──► ack/r = run
    rank 0                                     welcome/r = run, that number        until all acks name this run

Torchrun's agent keeps one store over all restarts, with what the processes before have left in it: the address of a rank
that is gone, an alarm that was raised. Counts of restarts do not tell attempts apart: each agent counts its own.
See pytorch issue 135712.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_LOOK = 0.02  # seconds between two looks at what others have written


def shared_with_attempts_before() -> bool:
    """Whether the store of the environment outlives this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(timeout: float) -> tuple[Any, int, int]:
    """The store of torchrun's environment, empty; this rank; the ranks. Every rank calls it alike.

    Raises:
        TimeoutError: some rank did not come within ``timeout`` seconds.
    """
    store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    prefix: Any = dist.PrefixStore  # type: ignore[attr-defined]
    store = prefix("meshwright-meeting", store)
    return prefix(agreed_run(store, rank, ranks, timeout), store), rank, ranks


def agreed_run(store: Any, rank: int, ranks: int, timeout: float) -> str:
    """A name for this run, the same on all its ranks and none that an earlier run had."""
    deadline = time.monotonic() + timeout
    return _host(store, ranks, deadline) if rank == 0 else _join(store, rank, deadline)


def _host(store: Any, ranks: int, deadline: float) -> str:
    run, missing, welcomed = uuid.uuid4().hex, set(range(1, ranks)), dict[int, bytes]()
    while missing:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]) and (hello := store.get(f"hello/{rank}")) != welcomed.get(rank):
                store.set(f"welcome/{rank}", f"{run} {hello.decode()}")  # who left it may be gone: then it comes again
                welcomed[rank] = hello
            if store.check([f"ack/{rank}"]) and store.get(f"ack/{rank}").decode() == run:
                missing.discard(rank)
        _pause(deadline, sorted(missing))
    return run


def _join(store: Any, rank: int, deadline: float) -> str:
    hello = uuid.uuid4().hex
    store.set(f"hello/{rank}", hello)
    while True:
        if store.check([f"welcome/{rank}"]):
            run, answers = store.get(f"welcome/{rank}").decode().split()
            if answers == hello:
                store.set(f"ack/{rank}", run)
                return str(run)
        _pause(deadline, [0])


def _pause(deadline: float, missing: list[int]) -> None:
    if missing and time.monotonic() > deadline:
        raise TimeoutError(
            f"rank{'s' * (len(missing) > 1)} {' '.join(map(str, missing[:20]))} did not come to the start"
        )
    time.sleep(_LOOK)
