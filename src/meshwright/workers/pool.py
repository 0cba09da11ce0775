"""A pool of local worker processes: started once, used by many runs.

    with local_workers(4) as workers:
        results = workers.run(function, *args)      # one result a rank

The life of a run:

    pool       start who is missing ─ make a store ─ task ─► all                 "finish" ─► all
    rank 0                                                    group ─ function ─ done ······ group gone ─ idle
    rank 1                                                    group ─ function ──────── done group gone ─ idle
    ...
    failed     a rank fails or dies: the others have a short grace to become idle; who does not is killed
    too late   nobody answers in time: the stacks of those yet to answer are read, then they are killed

Either way one `WorkerError` tells the first cause, and the pool stays usable: who was killed is started anew
when next needed. The worker's side is in `worker.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from meshwright.errors import PlanError
from meshwright.workers.forkserver import ForkServer
from meshwright.workers.pickling import pack, unpack
from meshwright.workers.process import Echo, WorkerProcess, environment_of, exchange, stacks_of
from meshwright.workers.scratch import tail_of
from meshwright.workers.worker import Task, report

__all__ = ["LocalWorkers", "WorkerError", "local_workers", "report"]

T = TypeVar("T")

TIMEOUT = 120.0  # seconds a run may go without an answer or a report
START_TIMEOUT = 120.0  # seconds workers may take to start: importing torch is slow on a busy machine
GRACE = 2.0  # seconds the others have to come back once one has failed
_LEAVE_TIMEOUT = 10.0  # seconds ranks may take to destroy their group after the last answer
_TICK = 0.1  # seconds between two looks at processes that may have died

# What the peers of a rank that has gone say.
LOST_PEER = re.compile(r"closed by peer|reset by peer|broken pipe|pair closure|remote process exited", re.IGNORECASE)


class WorkerError(RuntimeError):
    """A run failed on a rank: `rank`, `reason` (a line) and `details` (traceback, stacks, output).

    `plan_error`: the `PlanError` that the rank raised, if that is what failed; its text is all of the details then.
    """

    def __init__(self, rank: int, reason: str, details: str = "", plan_error: PlanError | None = None) -> None:
        super().__init__(f"{reason}\n\n{details}" if details else reason)
        self.rank = rank
        self.reason = reason
        self.details = details
        self.plan_error = plan_error

    def __reduce__(self) -> tuple[type[WorkerError], tuple[int, str, str, PlanError | None]]:
        return WorkerError, (self.rank, self.reason, self.details, self.plan_error)


def local_workers(
    ranks: int,
    *,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    start_timeout: float = START_TIMEOUT,
    threads: int = 1,
    start_method: Literal["fork", "spawn"] | None = None,
) -> LocalWorkers:
    """A pool of `ranks` worker processes on this machine, for use in a `with`; each starts when first needed.

    device: "cpu" (gloo); "cuda": rank r on GPU r (NCCL), or ranks share GPUs (gloo) where there are too few.
    timeout: the default of `run`. threads: torch's threads in each worker.
    start_method: "fork": one process imports torch, and all workers are forked from it; the default on Linux for CPUs.
    "spawn": each is a new interpreter, with a seed of its own for hashes, as under torchrun.
    """
    return LocalWorkers(ranks, device, timeout, start_timeout, threads, start_method or default_start_method(device))


def default_start_method(device: str) -> Literal["fork", "spawn"]:
    """Forks of a process that imported torch are whole on Linux; a GPU's driver does not live through a fork."""
    return "fork" if sys.platform == "linux" and device == "cpu" else "spawn"


class LocalWorkers:
    """See `local_workers`. One run at a time."""

    def __init__(
        self, ranks: int, device: str, timeout: float, start_timeout: float, threads: int, start_method: str
    ) -> None:
        if ranks < 1:
            raise ValueError(f"a pool needs at least one rank, given {ranks}")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device is 'cpu' or 'cuda', given {device!r}")
        if start_method not in ("fork", "spawn"):
            raise ValueError(f"start_method is 'fork' or 'spawn', given {start_method!r}")
        self.ranks = ranks
        self.device = device
        self.timeout = timeout
        self._start_timeout = start_timeout
        self._threads = threads
        self._forks = start_method == "fork"
        self._server: ForkServer | None = None  # which forks the workers
        self._children: dict[int, WorkerProcess] = {}
        self._lock = threading.Lock()
        self._runs = 0
        self._kept: dict[Any, Any] = {}

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        ranks: int | None = None,
        timeout: float | None = None,
        echo: bool = False,
        on_report: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on the first `ranks` workers, in a new process group. The results.

        timeout: seconds without an answer or a report, once the workers are up (`math.inf`: no limit).
        echo: show what rank 0 prints, live. on_report: gets what rank 0's function gives to `report`, live.
        Errors: `WorkerError`, the first failure; `TypeError` for what cannot be pickled. Arguments named like
        these four go through `functools.partial`.
        """
        count = self.ranks if ranks is None else ranks
        if not 1 <= count <= self.ranks:
            raise ValueError(f"ranks must be 1 to {self.ranks}, the size of the pool; given {count}")
        payload = pack((function, args, kwargs))
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("these workers are busy with another run")
        try:
            self._start(count)
            self._await_start(count)
            run = _Run(self._runs + 1, [self._children[rank] for rank in range(count)], echo, on_report)
            self._runs += 1
            answers = self._perform(run, payload, self.timeout if timeout is None else timeout)
        except WorkerError:
            raise
        except BaseException:  # an interrupt, or an error of on_report: nobody waits for the answers now
            self.kill()
            raise
        finally:
            self._lock.release()
        return [unpack(answer) for answer in answers]

    def start(self, ranks: int | None = None) -> None:
        """Start workers without waiting for them. Never needed: it only hides the time they take."""
        with self._lock:
            self._start(self.ranks if ranks is None else ranks)

    def kept(self, kind: Callable[[], T]) -> T:
        """The one `kind()` of this pool, made when it is first asked for: for what is to live as long as the pool."""
        if kind not in self._kept:
            self._kept[kind] = kind()
        value: T = self._kept[kind]
        return value

    def pids(self) -> list[int]:
        """The processes that live now, by rank."""
        children = [child for _, child in sorted(self._children.items())]
        return [child.process.pid for child in children if child.process.poll() is None]

    def kill(self) -> None:
        """End all workers at once. The pool stays usable."""
        self._drop(self._children.values())

    def close(self) -> None:
        """End all workers; the ones that are idle leave by themselves."""
        self._kept.clear()
        for child in self._children.values():
            child.channel.close()
        deadline = time.monotonic() + GRACE
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        self.close()

    def _start(self, count: int) -> None:
        """Begin what takes time."""
        if self._server is not None and not self._server.alive:
            self._drop(self._children.values())
            self._server.close()
            self._server = None
        gone = [c for c in self._children.values() if c.channel.closed or c.process.poll() is not None]
        self._drop(child for child in gone if child.rank < count)
        if not self._forks:
            self._add(count)
        elif self._server is None:
            self._server = ForkServer(environment_of(self._threads))

    def _add(self, count: int) -> None:
        for rank in range(count):
            if rank in self._children:
                continue
            try:
                self._children[rank] = WorkerProcess(rank, self._threads, self._server)
            except OSError as error:  # no more processes or memory; or what forks them has just died
                output = "" if self._server is None else tail_of(self._server.log)
                raise WorkerError(rank, f"worker {rank} did not start: {error}", output) from error

    def _await_server(self, server: ForkServer, deadline: float) -> None:
        while not server.up:
            ended = not server.alive
            if ended or time.monotonic() > deadline:
                what = (
                    f"ended with exit code {server.process.poll()}"
                    if ended
                    else f"not up after {self._start_timeout:g} s"
                )
                output = tail_of(server.log)
                self._server = None
                server.close()
                raise WorkerError(0, f"workers did not start: the process that forks them: {what}", output)
            server.listen(_TICK)

    def _await_start(self, count: int) -> None:
        deadline = time.monotonic() + self._start_timeout
        if self._server is not None:
            self._await_server(self._server, deadline)
            self._add(count)
        wanted = [self._children[rank] for rank in range(count)]
        while missing := [child for child in wanted if not child.ready]:
            late = time.monotonic() > deadline
            problems = [(missing[0], f"not up after {self._start_timeout:g} s")] if late else []
            for child, head, _ in exchange(missing, _TICK):
                child.greeted = True
                child.ready = head[0] == "ready"
                if head[0] == "died":
                    problems.insert(0, (child, child.death()))
            if problems:
                child, what = problems[0]
                output = child.output()
                self._drop(child for child in missing if not child.ready)
                raise WorkerError(child.rank, f"worker {child.rank} did not start: {what}", output)

    def _perform(self, run: _Run, payload: bytes, timeout: float) -> list[memoryview]:
        with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
            self._send(run, payload, timeout, directory)
            error = run.wait(timeout)
            run.leave(GRACE if error else _LEAVE_TIMEOUT)
            error = error or run.first_failure()
            self._drop(run.lost(keep_failed=self.device == "cpu"))
        if error is not None:
            raise error
        return [run.answers[child.rank] for child in run.children]

    def _send(self, run: _Run, payload: bytes, timeout: float, directory: str) -> None:
        port = _free_port()
        for child in run.children:
            child.clear_output()
            task = Task(
                run=run.number,
                rank=child.rank,
                ranks=len(run.children),
                store=os.path.join(directory, "store"),
                port=port,
                timeout=timeout,
                device=self.device,
                threads=self._threads,
                directory=os.getcwd(),
                path=list(sys.path),
                arguments=list(sys.argv),
            )
            child.channel.post(("task", task), payload)

    def _drop(self, children: Iterable[WorkerProcess]) -> None:
        children = list(children)
        for child in children:  # all at once; none waits for another's end
            child.kill()
        for child in children:
            child.discard()
            self._children.pop(child.rank, None)


_PORTS = range(20_000, 32_000)  # below those that systems give to whoever asks for any, gloo for each of its groups


def _free_port() -> int:
    """A port of this machine on which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class _Failure:
    rank: int
    when: float  # time.monotonic(), which all processes of a machine share
    reason: str
    details: str
    plan_error: PlanError | None = None

    @property
    def order(self) -> tuple[bool, float]:
        """First causes before those that only lost a peer, then by time."""
        return bool(LOST_PEER.search(self.details)), self.when


class _Run:
    """One run over some workers: who has answered, failed, come back."""

    def __init__(
        self, number: int, children: list[WorkerProcess], echo: bool, on_report: Callable[[Any], None] | None
    ) -> None:
        self.number = number
        self.children = children
        self.answers: dict[int, memoryview] = {}
        self._failures: list[_Failure] = []
        self._idle: set[int] = set()
        self._dead: set[int] = set()
        self._leaving = False
        self._on_report = on_report
        self._echo = Echo(children[0].log) if echo else None
        self._heard = time.monotonic()  # when somebody answered or reported last

    def wait(self, timeout: float) -> WorkerError | None:
        """Until everyone has answered, or one has failed, or the time is up. The error of the last case."""
        self._heard = time.monotonic()
        while len(self.answers) < len(self.children) and not self._failures:
            left = self._heard + timeout - time.monotonic()
            if left <= 0:
                return self._too_late(timeout)
            self._turn(min(left, _TICK))
        return None

    def leave(self, grace: float) -> None:
        """Let everyone leave the process group and come back, for as long as the grace lasts."""
        self._leaving = True
        for rank in self.answers:
            self.children[rank].channel.post(("finish",))
        deadline = time.monotonic() + (GRACE if self._failures else grace)
        while self._open() and (left := deadline - time.monotonic()) > 0:
            self._turn(min(left, _TICK))
        if self._echo:
            self._echo.show(last=True)

    def first_failure(self) -> WorkerError | None:
        if not self._failures:
            return None
        first = min(self._failures, key=lambda failure: failure.order)
        reason = f"rank {first.rank} of {len(self.children)} {first.reason}"
        if first.plan_error is not None:
            return WorkerError(first.rank, reason, str(first.plan_error), first.plan_error)
        details = [first.details, self.children[first.rank].output()]
        return WorkerError(first.rank, reason, "\n\n".join(part for part in details if part))

    def lost(self, keep_failed: bool) -> list[WorkerProcess]:
        """Workers not to be used again: dead, not back, or failed on a GPU (its context may be broken)."""
        failed = set() if keep_failed else {failure.rank for failure in self._failures}
        return [child for child in self.children if child.rank not in self._idle or child.rank in failed]

    def _open(self) -> list[WorkerProcess]:
        return [child for child in self.children if child.rank not in self._idle | self._dead]

    def _turn(self, wait: float) -> None:
        for child, head, body in exchange(self._open(), wait):
            kind = head[0]
            if kind == "report":
                self._heard = time.monotonic()
                if self._on_report:
                    self._on_report(unpack(body))
            elif kind == "done":
                self._heard = time.monotonic()
                self.answers[child.rank] = body
                if self._leaving:
                    child.channel.post(("finish",))
            elif kind == "failed":
                _, when, summary, details = head
                mistake = unpack(body) if body else None
                self._failures.append(_Failure(child.rank, when, f"failed: {summary}", details, mistake))
            elif kind == "idle":
                self._idle.add(child.rank)
            elif kind == "died":
                self._dead.add(child.rank)
                if len(self.answers) < len(self.children):
                    self._failures.append(_Failure(child.rank, time.monotonic(), child.death(), ""))
        if self._echo:
            self._echo.show()

    def _too_late(self, timeout: float) -> WorkerError:
        silent = [child for child in self.children if child.rank not in self.answers]
        stacks = stacks_of(silent)
        blocks = [f"Rank {child.rank} is in (innermost first):\n{stacks[child.rank]}" for child in silent]
        names = ", ".join(str(child.rank) for child in silent)
        plural = "s" if len(silent) > 1 else ""
        reason = f"no answer within {timeout:g} s from rank{plural} {names} of {len(self.children)}"
        if self.answers:
            reason += f" (answered: {', '.join(map(str, sorted(self.answers)))})"
        self._dead.update(child.rank for child in silent)
        for child in silent:
            child.kill()
        blocks += [silent[0].output()]
        return WorkerError(silent[0].rank, reason, "\n\n".join(block for block in blocks if block))
