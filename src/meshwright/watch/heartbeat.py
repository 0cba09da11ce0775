"""``Board``: the messages of the watchdogs of all ranks, in a store beside the job's collectives.

    who/3     once: host, node, process                      beat/3   each second: a number, step, action, progress
    alarm     reporting rank and cause: set once, by one     where/3  after an alarm: the location of that rank
    reported  the report has been printed: ranks may exit

A connection of a store carries one request at a time, and a request that waits blocks it. So a board has its own connection.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.watch.location import Whereabouts
from meshwright.watch.store_keys import StoreKeys

HERE, LEFT, FAILED = "here", "left", "failed"


@dataclass(frozen=True)
class RankProcess:
    """A rank's process.

    Attributes:
        host: name of its host.
        node: identifies the node of the job; several nodes may be on one host.
        pid: of the process.
        started: its start time by the kernel's clock, which distinguishes it from a later process with the same pid.
        stages: the pipeline's stages that it runs, such as ``stage 1``; empty without a pipeline.
    """

    host: str
    node: str
    pid: int
    started: str = ""
    stages: str = ""


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a rank.

    Attributes:
        number: counts the heartbeats of the rank.
        step: the step that its main thread is in.
        action: of the pipeline's schedule; empty without a pipeline.
        progress: a number that changes whenever the main thread makes progress.
        state: ``here``, ``left`` or ``failed``.
        error: text of the exception, if it failed.
    """

    number: int
    step: int
    action: str
    progress: int
    state: str = HERE
    error: str = ""


@dataclass(frozen=True)
class Alarm:
    """The end of the job.

    Attributes:
        reporter: the rank that prints the report.
        cause: the reason, as text.
    """

    reporter: int
    cause: str


class Board(StoreKeys):
    """The keys of one watchdog in a store.

    Args:
        store: a ``dist.Store``, with a connection that no other code uses.
        name: of the watchdog: equal on every rank, and unique in the store.
        rank: of this process.
        ranks: number of ranks.
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: int) -> None:
        super().__init__(store, name)
        self.rank, self.ranks = rank, ranks

    def introduce(self, who: RankProcess) -> None:
        """Posts the process of this rank."""
        self._set(f"who/{self.rank}", asdict(who))

    def post(self, beat: Beat) -> None:
        """Posts a heartbeat of this rank, in place of its last one."""
        self._set(f"beat/{self.rank}", asdict(beat))

    def post_location(self, where: Whereabouts) -> None:
        """Posts the location of this rank, after an alarm."""
        self._set(f"where/{self.rank}", where.as_data())

    def who(self) -> dict[int, RankProcess]:
        """Rank → process, of the ranks that have introduced themselves."""
        return {rank: RankProcess(**data) for rank, data in self._values_of("who", range(self.ranks)).items()}

    def beats(self, ranks: list[int]) -> dict[int, Beat]:
        """Rank → its last heartbeat, of the ranks that have posted one."""
        return {rank: Beat(**data) for rank, data in self._values_of("beat", ranks).items()}

    def where(self) -> dict[int, Whereabouts]:
        """Rank → its location, of the ranks that have answered an alarm."""
        return {rank: Whereabouts.of_data(data) for rank, data in self._values_of("where", range(self.ranks)).items()}

    def alarm(self) -> Alarm | None:
        """The alarm; None if no rank has raised one."""
        alarm = self._get("alarm")
        return None if alarm is None else Alarm(**alarm)

    def raise_alarm(self, cause: str) -> Alarm:
        """Raises an alarm, unless another rank has raised one. Returns the alarm that is in force."""
        alarm = json.dumps(asdict(Alarm(self.rank, cause)))
        return Alarm(**json.loads(self._store.compare_set(self._key("alarm"), "", alarm)))

    def set_reported(self) -> None:
        """Tells all ranks that the report has been printed."""
        self._set("reported", True)

    def is_reported(self) -> bool:
        """Whether the report has been printed."""
        return self._get("reported") is not None

    def _values_of(self, kind: str, ranks: Any) -> dict[int, Any]:
        """Rank → value of ``kind/rank``, for the ranks that have set it."""
        keys = {rank: self._key(f"{kind}/{rank}") for rank in ranks}
        if not self._store.check(list(keys.values())):  # a rank has not started, or has not answered yet
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}
