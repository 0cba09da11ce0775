"""What the ranks of a job tell each other while it runs, through a store beside its collectives.

    who/3     once: host, node, process                      beat/3   each second: a number, step, action, progress
    alarm     who tells, and why: set once, by one rank      where/3  after an alarm: where that rank is
    told      the report is out: everyone may end

A store's connection carries one request at a time, and one that waits holds it: a board has a connection of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.watch.location import Whereabouts

HERE, LEFT, FAILED = "here", "left", "failed"


@dataclass(frozen=True)
class Who:
    """A rank's process.

    Attributes:
        node: tells the nodes of a job apart, also where they are on one host.
        started: when, as the kernel counts, which tells it from a later process of that number.
        stages: the pipeline's, that it runs: ``stage 1``; empty without a pipeline.
    """

    host: str
    node: str
    pid: int
    started: str = ""
    stages: str = ""


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life. ``progress`` changes whenever its main thread gets on; ``state``: here, left or failed."""

    number: int
    step: int
    action: str
    progress: int
    state: str = HERE
    error: str = ""


@dataclass(frozen=True)
class Alarm:
    """Why the job is to end, and which rank tells it."""

    teller: int
    cause: str


class Board:
    """The keys of one watch in a store.

    Args:
        store: a ``dist.Store``, a connection that nobody else uses.
        name: of the watch, the same on every rank and another for every watch.
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: int) -> None:
        self._store, self._name, self.rank, self.ranks = store, name, rank, ranks

    def introduce(self, who: Who) -> None:
        self._set(f"who/{self.rank}", asdict(who))

    def post(self, beat: Beat) -> None:
        self._set(f"beat/{self.rank}", asdict(beat))

    def tell(self, where: Whereabouts) -> None:
        self._set(f"where/{self.rank}", where.as_data())

    def who(self) -> dict[int, Who]:
        return {rank: Who(**data) for rank, data in self._of_all("who", range(self.ranks)).items()}

    def beats(self, ranks: list[int]) -> dict[int, Beat]:
        """The last beat of each of these ranks, of those that have posted any."""
        return {rank: Beat(**data) for rank, data in self._of_all("beat", ranks).items()}

    def where(self) -> dict[int, Whereabouts]:
        return {rank: Whereabouts.of_data(data) for rank, data in self._of_all("where", range(self.ranks)).items()}

    def alarm(self) -> Alarm | None:
        alarm = self._get("alarm")
        return None if alarm is None else Alarm(**alarm)

    def raise_alarm(self, cause: str) -> Alarm:
        """The alarm that is raised by now: this one, or the one of a rank that was faster."""
        alarm = json.dumps(asdict(Alarm(self.rank, cause)))
        return Alarm(**json.loads(self._store.compare_set(self._key("alarm"), "", alarm)))

    def set_told(self) -> None:
        self._set("told", True)

    def told(self) -> bool:
        return self._get("told") is not None

    def _key(self, key: str) -> str:
        return f"meshwright/{self._name}/{key}"

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        """A value, or None: a store's own ``get`` waits for one."""
        key = self._key(key)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _of_all(self, kind: str, ranks: Any) -> dict[int, Any]:
        keys = {rank: self._key(f"{kind}/{rank}") for rank in ranks}
        if not self._store.check(list(keys.values())):  # some rank has not come, or has not answered yet
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}
