"""``FirstCause``: what the ranks of a job tell each other when one of them fails, through a store beside its collectives.

    who/3     when the job is made: process, connections
    failed/3  rank 3 failed, or lost another rank
    first     the rank that failed by itself, and why: set once

A rank tells before it closes its connections. So one that loses a connection finds the cause there, unless the other process
has ended without a word.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from meshwright import identity
from meshwright.watch.connections import Ends, close, connections
from meshwright.watch.store_keys import StoreKeys

_PATIENCE = 3.0  # seconds in which ranks that lost another one have said so
_MOST_RANKS = 512  # connections are told of up to so many: each rank has one to each other, in each group


@dataclass(frozen=True)
class Cause:
    """Why a rank failed.

    Attributes:
        step: in which; text: its error, as a person reads it.
    """

    rank: int
    step: int
    text: str


@dataclass(frozen=True)
class _Process:
    machine: str
    pid: int
    started: str
    ends: list[list[str]]


class FirstCause(StoreKeys):
    """The keys of one job in a store.

    Args:
        store: a ``dist.Store``, a connection that nobody else uses.
        name: of the job, the same on every rank and another for every job.
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: int) -> None:
        super().__init__(store, name)
        self._rank, self._ranks = rank, ranks
        pid, told = os.getpid(), ranks <= _MOST_RANKS
        ends = [list(pair) for pair in connections()] if told else []
        self._set(f"who/{rank}", asdict(_Process(identity.machine(), pid, identity.started(pid), ends)))

    def tell(self, cause: Cause, *, lost: bool) -> None:
        """This rank failed. Nothing is told if the store is gone.

        Args:
            lost: only since it has lost another rank.
        """
        with suppress(Exception):
            if not lost:
                self._store.compare_set(self._key("first"), "", json.dumps(asdict(cause)))
            self._set(f"failed/{self._rank}", True)

    def close_connections(self) -> None:
        """Ranks that wait for this one wait no more."""
        with suppress(Exception):
            others = [self._process(rank) for rank in range(self._ranks) if rank != self._rank]
            ends: list[Ends] = [(here, there) for other in others if other is not None for here, there in other.ends]
            close(ends, but=_port(self._store))

    def known(self) -> Cause | None:
        """What was told first; None if nothing was."""
        with suppress(Exception):
            told = self._get("first")
            return None if told is None else Cause(**told)
        return None

    def awaited(self) -> Cause | str:
        """What was told first, as soon as it is there. If no rank tells, in words: which ranks have ended, or say nothing."""
        deadline, silent = time.monotonic() + _PATIENCE, list(range(self._ranks))
        while time.monotonic() < deadline and silent:
            if (cause := self.known()) is not None:
                return cause
            with suppress(Exception):
                silent = [rank for rank in silent if self._get(f"failed/{rank}") is None]
                if ended := [rank for rank in silent if self._has_ended(rank)]:
                    return f"{_ranks(ended)} ended without a word (killed? what launched it may know)"
            time.sleep(0.05)
        if not silent:
            return "a connection between ranks was lost"
        return f"a connection was lost, and nothing was heard of {_ranks(silent)} since (ended? cut off?)"

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank of this machine has."""
        who = self._process(rank)
        here = who is not None and who.machine == identity.machine() != ""
        return who is not None and here and bool(who.started) and not identity.lives(who.pid, who.started)

    def _process(self, rank: int) -> _Process | None:
        told = self._get(f"who/{rank}")
        return None if told is None else _Process(**told)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _port(store: Any) -> int | None:
    """That of a ``TCPStore``, below the stores that put prefixes before its keys."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    port: int | None = getattr(store, "port", None)
    return port


__all__ = ["Cause", "FirstCause"]
