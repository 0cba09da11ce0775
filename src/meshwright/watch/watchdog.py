"""``Watch``: a rank that stops answering ends the job, with a report, instead of hanging it.

    main thread    step ─ step ─ step ─ all_reduce ···································· (waits for ever)
    pulse thread   beat   beat   beat   beat   alarm: where am I ─ report of all ─ exit code 75
    guard thread   looks at the clock alone: it ends the process where the store itself answers no more

Each rank posts a beat a second with what its main thread has got done: steps, actions of the pipeline, collectives. Any rank
that reads them may raise the alarm; the lowest that lives does. Nothing here waits for the main thread, nor for another rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from meshwright import identity, private
from meshwright.errors import PlanError
from meshwright.runtime.job import Job
from meshwright.watch.heartbeat import FAILED, HERE, LEFT, Alarm, Beat, Board, Who
from meshwright.watch.location import Ranks, Whereabouts, whereabouts
from meshwright.watch.report import Hang, spelled_ranks
from meshwright.workers.pool import LOST_PEER

HANG = (
    75  # exit code of ranks that a watch ends: EX_TEMPFAIL of sysexits.h, "try again"; torchrun restarts on any but 0
)
_MOST_READERS = 64  # ranks: of larger jobs one rank a node reads what the others post
_LONGER = 2.5  # times the timeout: a rank may wait in a collective while others get on, before the timeout begins
_SILENCE = 60.0  # seconds without a beat after which a rank is taken for dead, at most


@dataclass
class _Seen:
    """What one rank knows of another: its last beat, when that came, and when its progress last changed."""

    beat: Beat
    came: float
    moved: float


class Watch:
    """Ends the job where it gets on no more. For use in a ``with`` around the training loop, on every rank alike.

        with mw.Watch(job, timeout=300, folder="runs/a"):
            for batch in batches: ...

    Where no rank gets on (begins a step, an action of a pipeline or a collective; reads or writes a part of a checkpoint) for
    ``timeout`` seconds, or a rank gives no sign of life for half of that (60 seconds at most) and the others do not get on
    without it: every rank says where it is, the lowest that lives prints one report, and all end with exit code 75, upon which
    torchrun restarts them if it may. The first step and a compilation count like any other: the timeout is to be longer than
    the longest of them. Collectives wait longer than the watch does.

    Args:
        job: what ``parallelize`` gave.
        timeout: seconds. The report is made within them: gathering it takes a fifth of them, two seconds at most.
        folder: where ``hang.txt`` is written: the report, and the stack of every rank.
        step: the step before the first one here, if a run goes on: reports count from there. It may be set later, once the
            checkpoint is loaded.
        beat: seconds between two signs of life; default one, less where the timeout is short.

    Raises:
        PlanError: a timeout that is not positive.
    """

    def __init__(
        self, job: Job, timeout: float, *, folder: str | os.PathLike[str] | None = None, step: int = 0,
        beat: float | None = None,
    ) -> None:  # fmt: skip
        _check(timeout)
        self.job, self.timeout, self.step = job, timeout, step
        self.folder = None if folder is None else Path(folder)
        self.silence = min(_SILENCE, timeout / 2)
        self._beat_time = beat or min(1.0, timeout / 20)
        self._account_time = min(2.0, timeout / 5)  # for gathering a report
        self._first = job.steps
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._state, self._error = HERE, ""
        self._number, self._seen, self._who = 0, dict[int, _Seen](), dict[int, Who]()
        self._alarmed: float | None = None
        self._lost = ""  # why the store cannot be asked any more

    def __enter__(self) -> Watch:
        """Collective: all ranks agree on a name, as the store may have what watches before have left."""
        job, agreed = self.job, [uuid.uuid4().hex]
        self._ranks = dist.get_world_size()
        job.groups.wait_longer(_LONGER * self.timeout)  # else a collective's own timeout ends the job, without a report
        if self._ranks > 1:
            dist.broadcast_object_list(agreed, src=0)
        self._board, now = Board(private.job_store(), agreed[0], job.rank, self._ranks), time.monotonic()
        self._reads = self._ranks <= _MOST_READERS or os.environ.get("LOCAL_RANK", "0") == "0"
        self._me, self._mine = _this_process(job), (self._progress(), now)
        self._answered = self._moved = now
        self._board.introduce(self._me)
        self._board.post(self._beat())
        for name, run in (("pulse", self._pulse), ("guard", self._guard)):
            self._threads.append(threading.Thread(target=run, name=f"meshwright-{name}", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The others learn that this rank has left, or failed. It ends no process; where the store is in this one, it stays
        until the others have left too, or are silent. Where the error is the loss of another rank, a report tells of which."""
        self._state = LEFT if error is None else FAILED
        if error is not None:
            self._error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._failed_at = whereabouts(*self._now_at(), error)
        self._ended.set()
        self._threads[0].join(2 * self._account_time + 6 * self._beat_time)

    # --- what the main thread has done --------------------------------------------------------------------------------

    def _now_at(self) -> tuple[int, str, Ranks]:
        """The step, the action, and the ranks whose sends it needs."""
        step, pipeline = self.step + self.job.steps - self._first, self.job.pipeline
        if pipeline is None or pipeline.action is None:
            return step, "", ()
        homes = [self.job.recipe.stage_rank[stage] for stage in pipeline.traffic.awaited]
        line = dist.get_process_group_ranks(self.job.groups.pipeline)
        return step, str(pipeline.action), tuple(line[home] for home in homes)

    def _progress(self) -> int:
        """Grows whenever the main thread gets on; reading it costs microseconds, and the main thread nothing."""
        job = self.job
        actions = 0 if job.pipeline is None else len(job.pipeline.spans)
        return (
            job.steps * 1_000_003
            + actions
            + job.parts
            + sum(list(job.ledger.calls.values()))
            + private.collectives_entered()
        )

    # --- the pulse ----------------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        """All that goes through the store. It may wait for ever there: the guard does not."""
        try:
            while not self._ended.wait(self._beat_time):
                self._turn()
            self._board.post(self._beat())
            if self._state == LEFT:
                self._wait_for_others()
            elif LOST_PEER.search(self._error):
                self._name_the_lost()
        except Exception as error:  # the store is gone, in words of the store
            self._lost = f"{type(error).__name__}: {error}".splitlines()[0]

    def _turn(self) -> None:
        self._board.post(self._beat())
        if self._reads:
            self._look()
        alarm, now = self._board.alarm(), time.monotonic()
        self._answered = now
        if alarm is None and self._reads and (cause := self._cause(now)):
            alarm = self._board.raise_alarm(cause)
        if alarm is not None and not self._ended.is_set():
            self._alarmed = now
            self._account(alarm)

    def _beat(self) -> Beat:
        step, action, _ = self._now_at()
        progress, self._number = self._progress(), self._number + 1
        if progress != self._mine[0]:
            self._mine = progress, time.monotonic()
        return Beat(self._number, step, action, progress, self._state, self._error)

    def _look(self) -> None:
        """Takes in the beats of all ranks."""
        now = time.monotonic()
        for rank, beat in self._board.beats(list(range(self._ranks))).items():
            before = self._seen.get(rank)
            moved = before is None or before.beat.progress != beat.progress
            came = before is None or before.beat.number != beat.number
            if before is None or came:
                self._seen[rank] = _Seen(beat, now, now if moved or before is None else before.moved)
            if moved:
                self._moved = now
        if len(self._who) < len(self._seen):
            self._who = self._board.who()

    def _cause(self, now: float) -> str:
        """Why the job is to end; empty where it is not. A rank waits a little longer for every one below it that lives."""
        stalled = now - self._moved
        if any(seen.beat.state == HERE and rank < self.job.rank for rank, seen in self._living(now)):
            stalled -= 3 * self._beat_time
        if stalled >= self.timeout - self._account_time - self._beat_time:
            return f"no rank got on for {now - self._moved:.0f} s"
        if stalled >= self.silence and (gone := self._gone(now)):
            return f"{gone}, and no rank got on since"
        return ""

    def _living(self, now: float) -> list[tuple[int, _Seen]]:
        return [(rank, seen) for rank, seen in self._seen.items() if now - seen.came < self.silence]

    def _silent(self, now: float) -> tuple[int, ...]:
        living = dict(self._living(now))
        return tuple(sorted(r for r, s in self._seen.items() if r not in living and s.beat.state == HERE))

    def _gone(self, now: float) -> str:
        failed = [rank for rank, seen in self._seen.items() if seen.beat.state == FAILED]
        if silent := self._silent(now):
            return f"no sign of life of {len(silent)} of {self._ranks} ranks for {self.silence:.0f} s"
        return f"{len(failed)} of {self._ranks} ranks failed" if failed else ""

    def _wait_for_others(self) -> None:
        """The store may live in rank 0's process: it stays while others may ask it."""
        deadline = time.monotonic() + self.silence
        while self.job.rank == 0 and time.monotonic() < deadline:
            beats = self._board.beats(list(range(self._ranks)))
            if len(beats) == self._ranks and all(beat.state != HERE for beat in beats.values()):
                return
            time.sleep(min(0.05, self._beat_time))

    def _name_the_lost(self) -> None:
        """This rank lost its connection to another, whose end nobody else may tell: the lowest that lost one does."""
        self._board.tell(self._failed_at)
        deadline = time.monotonic() + 5 * self._beat_time
        while not (gone := self._dead_here() or self._late(3 * self._beat_time)) and time.monotonic() < deadline:
            time.sleep(self._beat_time / 2)
            self._board.post(self._beat())
        alike = [r for r, s in self._seen.items() if s.beat.state == FAILED and LOST_PEER.search(s.beat.error)]
        if gone and self.job.rank <= min(alike, default=self.job.rank):
            hang = self._hang(f"{spelled_ranks(gone)} of {self._ranks} gone", self._board.where())
            self._tell(replace(hang, silent=tuple(gone)))

    def _late(self, most: float) -> list[int]:
        """Ranks that have neither left nor failed, and whose last beat is older than so many seconds."""
        now = time.monotonic()
        return sorted(r for r, seen in self._seen.items() if seen.beat.state == HERE and now - seen.came > most)

    def _dead_here(self) -> list[int]:
        """Ranks of this node whose processes have ended without a word."""
        self._look()
        here = [rank for rank, who in self._who.items() if who.node == self._me.node and who.started]
        return [r for r in sorted(here) if self._seen[r].beat.state == HERE and not _lives(self._who[r])]

    # --- the end ------------------------------------------------------------------------------------------------------

    def _account(self, alarm: Alarm) -> NoReturn:
        """Says where this rank is; tells of all, if it is the one to tell; ends the process."""
        deadline = time.monotonic() + self._account_time
        self._board.tell(self._whereabouts())
        if alarm.teller == self.job.rank:
            self._tell(self._gather(alarm.cause, deadline))
            with contextlib.suppress(Exception):
                self._board.set_told()
            time.sleep(0.2)  # the others hear of it, and ask no more: the store may be in this process
            self._end()
        with contextlib.suppress(Exception):  # the teller may take the store along
            while time.monotonic() < deadline + self._account_time and not self._board.told():
                time.sleep(0.05)
        time.sleep(0.5)  # the teller ends first: a launcher shows the output of who did
        self._end()

    def _whereabouts(self) -> Whereabouts:
        return whereabouts(*self._now_at())

    def _gather(self, cause: str, deadline: float) -> Hang:
        """What the ranks say, once all that live have answered, or the time is up."""
        where: dict[int, Whereabouts] = {}
        while time.monotonic() < deadline:
            self._look()
            where = self._board.where()
            alive = {rank for rank, seen in self._seen.items() if seen.beat.state == HERE}
            if not alive - set(where) - set(self._silent(time.monotonic())):
                break
            time.sleep(0.05)
        return self._hang(cause, where)

    def _hang(self, cause: str, where: dict[int, Whereabouts]) -> Hang:
        now = time.monotonic()
        return Hang(
            cause, self._ranks, self._who, {rank: seen.beat for rank, seen in self._seen.items()},
            where,
            {rank: now - seen.moved for rank, seen in self._seen.items()}, self._silent(now),
        )  # fmt: skip

    def _tell(self, hang: Hang, file: str = "hang.txt") -> None:
        # Written past Python's own streams: the main thread may hold their locks.
        os.write(2, (hang.report() + "\n").encode())
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / file).write_text(hang.full(), encoding="utf-8")

    def _end(self) -> NoReturn:
        """Ends this process, and stopped ones of this node: their launcher's SIGTERM would not reach them."""
        for rank in self._silent(time.monotonic()):
            who = self._who.get(rank)
            if who is not None and who.node == self._me.node and who.started and _lives(who):
                with contextlib.suppress(OSError):
                    os.kill(who.pid, signal.SIGKILL)
        os._exit(HANG)

    # --- the guard ----------------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """Looks at the clock, and asks nobody."""
        while not self._ended.wait(self._beat_time):
            now = time.monotonic()
            if self._alarmed is not None:
                if now - self._alarmed > 3 * self._account_time + 1:
                    self._end()
                continue
            progress = self._progress()
            if progress != self._mine[0]:
                self._mine = progress, now
            if now - max(self._answered, self._mine[1]) >= self.silence:
                self._alone()

    def _alone(self) -> NoReturn:
        """The store answers no more, and this rank does not get on: each rank of a node that is cut off ends so."""
        rank, here, now = self.job.rank, self._whereabouts(), time.monotonic()
        cause = (
            f"rank {rank}: the store at {_store_address()} has not answered for {now - self._answered:.0f} s "
            f"({self._lost or 'cut off?'})"
        )
        self._who = {**self._who, rank: self._me}
        if os.environ.get("LOCAL_RANK", "0") != "0":
            os.write(2, f"meshwright: {cause}; {here.collective or 'in no collective'}; {here.line}\n".encode())
            self._end()
        beat = replace(self._seen[rank].beat, number=self._number) if rank in self._seen else self._beat()
        self._seen[rank] = _Seen(beat, now, self._mine[1])
        self._tell(self._hang(cause, {rank: here}), f"hang-rank-{rank}.txt")
        self._end()


def _check(timeout: float) -> None:
    if timeout > 0:
        return
    raise PlanError.of(
        "this watch",
        where="timeout",
        given=f"{timeout:g}",
        required="seconds, more than the longest step takes",
        fix="300",
    )


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _this_process(job: Job) -> Who:
    host, pid = socket.gethostname(), os.getpid()
    stages = [] if job.pipeline is None else job.pipeline.stages
    named = f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}" if stages else ""
    return Who(host, f"{host}/{os.environ.get('GROUP_RANK', '0')}", pid, identity.started(pid), named)


def _lives(who: Who) -> bool:
    """Whether a process of this machine still is: neither ended, nor another's number by now."""
    return identity.lives(who.pid, who.started)


__all__ = ["HANG", "Watch"]
