"""``Watch``: a watchdog. If a rank stops, it ends the job with a report; without it, the other ranks would hang.

    main thread    step ─ step ─ step ─ all_reduce ···································· (waits forever)
    pulse thread   beat   beat   beat   beat   alarm: location ─ report of all ranks ─ exit code 75
    guard thread   reads only the clock: it ends the process if the store does not answer

Each rank posts a heartbeat each second with the progress of its main thread: steps, actions of the pipeline, collectives. Any
rank that reads them may raise the alarm; usually the lowest living rank does. No thread here waits for the main thread, or for
another rank.
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
from meshwright.watch.heartbeat import FAILED, HERE, LEFT, Alarm, Beat, Board, RankProcess
from meshwright.watch.location import Ranks, Whereabouts, whereabouts
from meshwright.watch.report import Hang, spelled_ranks
from meshwright.workers.pool import LOST_PEER

HANG = 75  # exit code of a watchdog: EX_TEMPFAIL of sysexits.h, "try again"; torchrun restarts on any code but 0
# most ranks of a job in which every rank reads all heartbeats; in a larger job, one rank of each node reads them
_MOST_READERS = 64
# the timeout of collectives, in timeouts of the watchdog: a rank may wait in one while others still make progress
_LONGER = 2.5
# most seconds without a heartbeat until a rank counts as dead: a few seconds of a busy host are not enough
_SILENCE = 60.0
_ERROR_WIDTH = 200  # most characters of an exception's text
# progress of one step, larger than the counts within a step: then the sum changes with each
_PROGRESS_STRIDE = 1_000_003
_BEAT = 1.0  # seconds from one heartbeat to the next: the store serves all ranks, each with one small write
_BEATS = 20  # heartbeats in a timeout, if the timeout is short
_LATE = 3  # missed heartbeats after which a rank counts as late: one can be lost, or a host be busy for a moment
_GATHER = 2.0  # most seconds for gathering a report: ranks answer within two heartbeats
_GATHERS = 5  # a report takes at most this part of the timeout
_LATE_GATHERS = 3  # a process ends without the report if the report takes so many times its time limit
_EXIT_TIME = 1.0  # seconds for a process to exit by itself
_POLL = 0.05  # seconds between two looks at the store while a report is gathered
_GRACE = 0.2  # seconds for other ranks to read that the report is out, before the process that may hold the store exits
_REPORTER_FIRST = 0.5  # seconds that other ranks exit later: a launcher shows the output of the rank that exits first


@dataclass
class _LastBeat:
    """The last heartbeat of a rank, as this rank has read it from the store.

    Attributes:
        beat: the heartbeat.
        read_at: the time when it was first read.
        progress_at: the time when a heartbeat with new progress was last read.
    """

    beat: Beat
    read_at: float
    progress_at: float


class Watch:
    """Ends the job if it stops making progress. Use it in a ``with`` block around the training loop, on every rank.

        with mw.Watch(job, timeout=300, folder="runs/a"):
            for batch in batches: ...

    Progress is the begin of a step, of an action of a pipeline or of a collective, and reading or writing a part of a
    checkpoint. The watchdog ends the job if no rank makes progress for ``timeout`` seconds; or if a rank sends no heartbeat for
    half of that (at most 60 seconds) and no other rank makes progress since. Then every rank reports its location, the lowest
    living rank prints one report, and all exit with code 75, on which torchrun restarts them if it may.

    The first step and a compilation count like any other step, so the timeout must be longer than the longest of them. The
    timeout of collectives is set to more than that of the watchdog.

    Args:
        job: the result of ``parallelize``.
        timeout: seconds. The report is made within this time: gathering it takes a fifth of it, at most two seconds.
        folder: for ``hang.txt``: the report, and the stack of every rank.
        step: the last step before this process, if a run resumes, for the numbers in reports. It may be set later, once the
            checkpoint is loaded.
        beat: seconds between two heartbeats. Default: one, or less if the timeout is short.

    Raises:
        PlanError: the timeout is not positive.
    """

    def __init__(
        self, job: Job, timeout: float, *, folder: str | os.PathLike[str] | None = None, step: int = 0,
        beat: float | None = None,
    ) -> None:  # fmt: skip
        _check(timeout)
        self.job, self.timeout, self.step = job, timeout, step
        self.folder = None if folder is None else Path(folder)
        self.silence = min(_SILENCE, timeout / 2)
        self._beat_time = beat or min(_BEAT, timeout / _BEATS)
        self._gather_time = min(_GATHER, timeout / _GATHERS)
        self._first_step = job.steps
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._state, self._error = HERE, ""
        self._number = 0  # of this rank's last heartbeat
        self._last_beats: dict[int, _LastBeat] = {}
        self._who: dict[int, RankProcess] = {}
        self._alarm_at: float | None = None
        self._store_error = ""  # why the store cannot be used any more

    def __enter__(self) -> Watch:
        """Starts the threads. Collective: all ranks agree on a new name, as the store may have keys of earlier watchdogs."""
        job, name = self.job, [uuid.uuid4().hex]
        self._ranks = dist.get_world_size()
        job.groups.wait_longer(_LONGER * self.timeout)  # else a collective's own timeout ends the job, without a report
        if self._ranks > 1:
            dist.broadcast_object_list(name, src=0)
        self._board, now = Board(private.job_store(), name[0], job.rank, self._ranks), time.monotonic()
        self._reads_all = self._ranks <= _MOST_READERS or os.environ.get("LOCAL_RANK", "0") == "0"
        self._process = _this_process(job)
        self._own_progress = self._progress(), now  # of this rank: the number, and the time when it last changed
        self._store_answered_at = self._any_progress_at = now
        self._board.introduce(self._process)
        self._board.post(self._beat())
        for thread, run in (("pulse", self._pulse), ("guard", self._guard)):
            self._threads.append(threading.Thread(target=run, name=f"meshwright-{thread}", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tells the other ranks that this one has left, or failed. Does not end the process.

        If the store is in this process, it waits until the others have left, too, or are silent. If the error is the loss of
        another rank, it reports which rank.
        """
        self._state = LEFT if error is None else FAILED
        if error is not None:
            self._error = f"{type(error).__name__}: {error}".splitlines()[0][:_ERROR_WIDTH]
            self._error_location = whereabouts(*self._position(), error)
        self._ended.set()
        self._threads[0].join(2 * (self._gather_time + _LATE * self._beat_time))  # twice what its last round can take

    # --- the progress of the main thread ------------------------------------------------------------------------------

    def _position(self) -> tuple[int, str, Ranks]:
        """(step, action of the pipeline, ranks from which the action receives) of the main thread."""
        step, pipeline = self.step + self.job.steps - self._first_step, self.job.pipeline
        if pipeline is None or pipeline.action is None:
            return step, "", ()
        positions = [self.job.recipe.stage_rank[stage] for stage in pipeline.traffic.awaited]
        ranks = dist.get_process_group_ranks(self.job.groups.pipeline)
        return step, str(pipeline.action), tuple(ranks[position] for position in positions)

    def _progress(self) -> int:
        """A number that grows whenever the main thread makes progress.

        Reading it takes microseconds, and never blocks the main thread.
        """
        job = self.job
        actions = 0 if job.pipeline is None else len(job.pipeline.spans)
        return (
            job.steps * _PROGRESS_STRIDE
            + actions
            + job.parts
            + sum(list(job.ledger.calls.values()))
            + private.collectives_entered()
        )

    # --- the pulse ----------------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        """The thread for everything that uses the store. It may hang there, which the guard thread notices."""
        try:
            while not self._ended.wait(self._beat_time):
                self._one_round()
            self._board.post(self._beat())
            if self._state == LEFT:
                self._wait_for_others()
            elif LOST_PEER.search(self._error):
                self._report_lost_ranks()
        except Exception as error:  # the store is gone; its client raises various exceptions
            self._store_error = f"{type(error).__name__}: {error}".splitlines()[0]

    def _one_round(self) -> None:
        """Posts a heartbeat, reads those of others, and raises or answers an alarm."""
        self._board.post(self._beat())
        if self._reads_all:
            self._read_beats()
        alarm, now = self._board.alarm(), time.monotonic()
        self._store_answered_at = now
        if alarm is None and self._reads_all and (cause := self._alarm_cause(now)):
            alarm = self._board.raise_alarm(cause)
        if alarm is not None and not self._ended.is_set():
            self._alarm_at = now
            self._answer(alarm)

    def _beat(self) -> Beat:
        """The next heartbeat of this rank."""
        step, action, _ = self._position()
        progress, self._number = self._progress(), self._number + 1
        if progress != self._own_progress[0]:
            self._own_progress = progress, time.monotonic()
        return Beat(self._number, step, action, progress, self._state, self._error)

    def _read_beats(self) -> None:
        """Reads the heartbeats of all ranks."""
        now = time.monotonic()
        for rank, beat in self._board.beats(list(range(self._ranks))).items():
            before = self._last_beats.get(rank)
            has_progress = before is None or before.beat.progress != beat.progress
            is_new = before is None or before.beat.number != beat.number
            if before is None or is_new:
                progress_at = now if has_progress or before is None else before.progress_at
                self._last_beats[rank] = _LastBeat(beat, now, progress_at)
            if has_progress:
                self._any_progress_at = now
        if len(self._who) < len(self._last_beats):
            self._who = self._board.who()

    def _alarm_cause(self, now: float) -> str:
        """The reason to raise an alarm, as text; empty if there is none.

        A rank waits a little longer if a lower rank lives, so that the lowest one raises the alarm.
        """
        stalled = now - self._any_progress_at
        if any(last.beat.state == HERE and rank < self.job.rank for rank, last in self._living(now)):
            stalled -= _LATE * self._beat_time
        if stalled >= self.timeout - self._gather_time - self._beat_time:
            return f"no rank made progress for {now - self._any_progress_at:.0f} s"
        if stalled >= self.silence and (lost := self._lost_ranks_text(now)):
            return f"{lost}, and no rank made progress since"
        return ""

    def _living(self, now: float) -> list[tuple[int, _LastBeat]]:
        """(rank, its last heartbeat), for the ranks whose last heartbeat is recent."""
        return [(rank, last) for rank, last in self._last_beats.items() if now - last.read_at < self.silence]

    def _silent(self, now: float) -> tuple[int, ...]:
        """The ranks whose heartbeats have stopped, although they have neither left nor failed."""
        living = dict(self._living(now))
        beats = self._last_beats.items()
        return tuple(sorted(rank for rank, last in beats if rank not in living and last.beat.state == HERE))

    def _lost_ranks_text(self, now: float) -> str:
        """A text about silent or failed ranks; empty if there are none."""
        failed = [rank for rank, last in self._last_beats.items() if last.beat.state == FAILED]
        if silent := self._silent(now):
            return f"no sign of life of {len(silent)} of {self._ranks} ranks for {self.silence:.0f} s"
        return f"{len(failed)} of {self._ranks} ranks failed" if failed else ""

    def _wait_for_others(self) -> None:
        """On rank 0, whose process may hold the store, waits until the other ranks have left or failed, for a limited time."""
        deadline = time.monotonic() + self.silence
        while self.job.rank == 0 and time.monotonic() < deadline:
            beats = self._board.beats(list(range(self._ranks)))
            if len(beats) == self._ranks and all(beat.state != HERE for beat in beats.values()):
                return
            time.sleep(min(_POLL, self._beat_time))

    def _report_lost_ranks(self) -> None:
        """Reports the ranks that have died, after this rank has lost a connection. The lowest rank that lost one prints."""
        self._board.post_location(self._error_location)
        deadline = time.monotonic() + (_LATE + 2) * self._beat_time
        while not (lost := self._dead_on_this_node() or self._late(_LATE * self._beat_time)):
            if time.monotonic() >= deadline:
                break
            time.sleep(self._beat_time / 2)
            self._board.post(self._beat())
        failed = [(rank, last.beat) for rank, last in self._last_beats.items() if last.beat.state == FAILED]
        lost_connection = [rank for rank, beat in failed if LOST_PEER.search(beat.error)]
        if lost and self.job.rank <= min(lost_connection, default=self.job.rank):
            hang = self._hang(f"{spelled_ranks(lost)} of {self._ranks} gone", self._board.where())
            self._print(replace(hang, silent=tuple(lost)))

    def _late(self, seconds: float) -> list[int]:
        """Ranks that have neither left nor failed, and whose last heartbeat is older than ``seconds``."""
        now = time.monotonic()
        present = [(rank, last.read_at) for rank, last in self._last_beats.items() if last.beat.state == HERE]
        return sorted(rank for rank, read_at in present if now - read_at > seconds)

    def _dead_on_this_node(self) -> list[int]:
        """Ranks of this node whose processes have ended, although they have neither left nor failed."""
        self._read_beats()
        ranks = [rank for rank, who in self._who.items() if who.node == self._process.node and who.started]
        present = [rank for rank in sorted(ranks) if self._last_beats[rank].beat.state == HERE]
        return [rank for rank in present if not _lives(self._who[rank])]

    # --- the end ------------------------------------------------------------------------------------------------------

    def _answer(self, alarm: Alarm) -> NoReturn:
        """Posts the location of this rank, and ends the process. Before, the reporter prints the report of all ranks."""
        deadline = time.monotonic() + self._gather_time
        self._board.post_location(self._whereabouts())
        if alarm.reporter == self.job.rank:
            self._print(self._gathered(alarm.cause, deadline))
            with contextlib.suppress(Exception):
                self._board.set_reported()
            time.sleep(_GRACE)
            self._end_process()
        with contextlib.suppress(Exception):  # the store may end with the reporter's process
            while time.monotonic() < deadline + self._gather_time and not self._board.is_reported():
                time.sleep(_POLL)
        time.sleep(_REPORTER_FIRST)
        self._end_process()

    def _whereabouts(self) -> Whereabouts:
        return whereabouts(*self._position())

    def _gathered(self, cause: str, deadline: float) -> Hang:
        """The facts for a report, once all living ranks have posted their locations, or at the deadline."""
        where: dict[int, Whereabouts] = {}
        while time.monotonic() < deadline:
            self._read_beats()
            where = self._board.where()
            present = {rank for rank, last in self._last_beats.items() if last.beat.state == HERE}
            if not present - set(where) - set(self._silent(time.monotonic())):
                break
            time.sleep(_POLL)
        return self._hang(cause, where)

    def _hang(self, cause: str, where: dict[int, Whereabouts]) -> Hang:
        """The facts of this moment, for a report."""
        now = time.monotonic()
        return Hang(
            cause=cause,
            ranks=self._ranks,
            who=self._who,
            beats={rank: last.beat for rank, last in self._last_beats.items()},
            where=where,
            idle={rank: now - last.progress_at for rank, last in self._last_beats.items()},
            silent=self._silent(now),
        )

    def _print(self, hang: Hang, file: str = "hang.txt") -> None:
        """Prints a report to stderr, and writes the full one to ``file`` in the folder."""
        # Not through Python's stream, whose lock the main thread may hold.
        os.write(2, (hang.report() + "\n").encode())
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / file).write_text(hang.full(), encoding="utf-8")

    def _end_process(self) -> NoReturn:
        """Exits this process. Kills silent processes of this node before, which the launcher's SIGTERM may not stop."""
        for rank in self._silent(time.monotonic()):
            who = self._who.get(rank)
            if who is not None and who.node == self._process.node and who.started and _lives(who):
                with contextlib.suppress(OSError):
                    os.kill(who.pid, signal.SIGKILL)
        os._exit(HANG)

    # --- the guard ----------------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """The thread that uses only the clock: it ends the process if the pulse thread hangs, or the store does not answer."""
        while not self._ended.wait(self._beat_time):
            now = time.monotonic()
            if self._alarm_at is not None:
                if now - self._alarm_at > _LATE_GATHERS * self._gather_time + _EXIT_TIME:
                    self._end_process()
                continue
            progress = self._progress()
            if progress != self._own_progress[0]:
                self._own_progress = progress, now
            if now - max(self._store_answered_at, self._own_progress[1]) >= self.silence:
                self._end_without_store()

    def _end_without_store(self) -> NoReturn:
        """Prints a report of this rank alone, and ends the process: the store does not answer, and this rank makes no progress.

        All ranks of a node that is cut off from the store end this way.
        """
        rank, where, now = self.job.rank, self._whereabouts(), time.monotonic()
        cause = (
            f"rank {rank}: the store at {_store_address()} has not answered for {now - self._store_answered_at:.0f} s "
            f"({self._store_error or 'cut off?'})"
        )
        self._who = {**self._who, rank: self._process}
        if os.environ.get("LOCAL_RANK", "0") != "0":
            os.write(2, f"meshwright: {cause}; {where.collective or 'in no collective'}; {where.line}\n".encode())
            self._end_process()
        last = self._last_beats.get(rank)
        beat = self._beat() if last is None else replace(last.beat, number=self._number)
        self._last_beats[rank] = _LastBeat(beat, now, self._own_progress[1])
        self._print(self._hang(cause, {rank: where}), f"hang-rank-{rank}.txt")
        self._end_process()


def _check(timeout: float) -> None:
    """Raises PlanError if the timeout is not positive."""
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


def _this_process(job: Job) -> RankProcess:
    host, pid = socket.gethostname(), os.getpid()
    stages = [] if job.pipeline is None else job.pipeline.stages
    stages_text = f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}" if stages else ""
    return RankProcess(host, f"{host}/{os.environ.get('GROUP_RANK', '0')}", pid, identity.started(pid), stages_text)


def _lives(who: RankProcess) -> bool:
    """Whether a process of this machine still runs. False if its pid now belongs to another process."""
    return identity.lives(who.pid, who.started)


__all__ = ["HANG", "Watch"]
