"""``FirstCause``: the error of the rank that failed first. All ranks of a job read it from a store beside the collectives.

    who/3     rank 3 sets it when the job is made: its process and its connections
    failed/3  rank 3 sets it when it fails, or loses another rank
    first     the first rank that fails by itself sets it: the rank, its step, its error. It is set only once

A rank writes to the store before it closes its connections. So a rank that loses a connection reads the cause there, unless
the other process ended without a message.
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

_PATIENCE = 3.0  # seconds to wait for the other ranks to write that they failed
# most ranks of a job whose ranks publish their connections: each has one to each other rank, in each group
_MOST_RANKS = 512


@dataclass(frozen=True)
class Cause:
    """The failure of one rank.

    Attributes:
        rank: the rank that failed.
        step: the step in which the rank failed.
        text: the text of its error, for a person.
    """

    rank: int
    step: int
    text: str


@dataclass(frozen=True)
class _Process:
    """The process of one rank, as JSON in the store. ``started``: see ``identity.started``. ``ends``: its TCP connections."""

    machine: str
    pid: int
    started: str
    ends: list[list[str]]


class FirstCause(StoreKeys):
    """The keys of one job in a store.

    Args:
        store: a ``dist.Store``, with a connection that no other code uses.
        name: of the job. It must be equal on every rank, and unique in the store.
        rank: of this process.
        ranks: number of ranks.
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: int) -> None:
        super().__init__(store, name)
        self._rank, self._ranks = rank, ranks
        pid = os.getpid()
        ends = [list(pair) for pair in connections()] if ranks <= _MOST_RANKS else []
        self._set(f"who/{rank}", asdict(_Process(identity.machine(), pid, identity.started(pid), ends)))

    def report(self, cause: Cause, *, lost: bool) -> None:
        """Writes that this rank failed. Does nothing if the store is gone.

        Args:
            cause: the failure of this rank.
            lost: whether this rank failed only because it lost another rank. Then ``cause`` is not the first cause.
        """
        with suppress(Exception):
            if not lost:
                self._store.compare_set(self._key("first"), "", json.dumps(asdict(cause)))
            self._set(f"failed/{self._rank}", True)

    def close_connections(self) -> None:
        """Shuts down the connections to other ranks, so that ranks that wait for this one get an error."""
        with suppress(Exception):
            others = [self._process(rank) for rank in range(self._ranks) if rank != self._rank]
            ends: list[Ends] = []
            for process in others:
                if process is not None:
                    ends += [(local, remote) for local, remote in process.ends]
            close(ends, but=_port(self._store))

    def get(self) -> Cause | None:
        """The first cause; None if no rank has written one, or the store is gone."""
        with suppress(Exception):
            data = self._get("first")
            return None if data is None else Cause(**data)
        return None

    def wait(self) -> Cause | str:
        """Waits up to ``_PATIENCE`` seconds for the first cause.

        Returns:
            The first cause. If no rank writes one: a text that names the ranks that ended or did not answer.
        """
        deadline, silent = time.monotonic() + _PATIENCE, list(range(self._ranks))
        while time.monotonic() < deadline and silent:
            if (cause := self.get()) is not None:
                return cause
            with suppress(Exception):
                silent = [rank for rank in silent if self._get(f"failed/{rank}") is None]
                if ended := [rank for rank in silent if self._has_ended(rank)]:
                    return f"{_ranks(ended)} ended without a word (killed? the output of its launcher may say why)"
            time.sleep(0.05)
        if not silent:
            return "a connection between ranks was lost"
        return f"a connection was lost, and no message came from {_ranks(silent)} since (ended? cut off?)"

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended. False if that is unknown, as of a rank on another machine."""
        process = self._process(rank)
        if process is None or not process.started:
            return False
        on_this_machine = process.machine == identity.machine() != ""
        return on_this_machine and not identity.lives(process.pid, process.started)

    def _process(self, rank: int) -> _Process | None:
        data = self._get(f"who/{rank}")
        return None if data is None else _Process(**data)


def _ranks(ranks: list[int]) -> str:
    """Ranks as text; of more than eight, the first eight.

    >>> _ranks([3]), _ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _port(store: Any) -> int | None:
    """The port of a ``TCPStore``, which may be inside of ``PrefixStore``s; None for another store."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    port: int | None = getattr(store, "port", None)
    return port


__all__ = ["Cause", "FirstCause"]
