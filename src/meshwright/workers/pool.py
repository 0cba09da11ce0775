"""``local_workers``: a pool of local worker processes, which start once and serve many runs.

    with local_workers(4) as workers:
        results = workers.run(function, *args)      # one result for each rank

The life of a run:

    pool       start missing workers ─ make a store ─ task ─► all                "finish" ─► all
    rank 0                                                    group ─ function ─ done ······ group gone ─ idle
    rank 1                                                    group ─ function ──────── done group gone ─ idle
    ...
    failed     a rank fails or dies: the others have a short time to become idle; a worker that does not is killed
    too late   no rank answers in time: the pool reads the stacks of the ranks without an answer, then kills them

In both cases `run` raises one `WorkerError` with the first cause, and the pool stays usable: it starts a new worker for each
killed one when the rank is next needed. The worker's side is in `worker.py`.
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

TIMEOUT = 120.0  # most seconds of a run without an answer or a report
START_TIMEOUT = 120.0  # most seconds for workers to start: the import of torch is slow on a busy machine
GRACE = 2.0  # seconds for the other ranks to become idle after one has failed
_LEAVE_TIMEOUT = 10.0  # most seconds for ranks to destroy their group after the last answer
_TICK = 0.1  # seconds between two checks for processes that have died

# Matches the errors of ranks whose connection to another rank was lost.
LOST_PEER = re.compile(r"closed by peer|reset by peer|broken pipe|pair closure|remote process exited", re.IGNORECASE)


class WorkerError(RuntimeError):
    """A run failed on a rank.

    Attributes:
        rank: the rank that failed first.
        reason: one line.
        details: traceback, stacks and output; the text of ``plan_error`` if there is one.
        plan_error: the `PlanError` that the rank raised; None if it failed otherwise.
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
    """Makes a pool of worker processes on this machine, for a `with` statement. A worker starts when it is first needed.

    Args:
        ranks: the largest number of ranks of a run.
        device: "cpu" (gloo), or "cuda": rank r on GPU r (NCCL). If there are too few GPUs, ranks share them (gloo).
        timeout: default of `run`, in seconds.
        start_timeout: most seconds for workers to start.
        threads: torch's threads in each worker.
        start_method: "fork": one process imports torch, and all workers are forked from it; the default on Linux for CPUs.
            "spawn": each worker is a new interpreter, with its own hash seed, as under torchrun.
    """
    return LocalWorkers(ranks, device, timeout, start_timeout, threads, start_method or default_start_method(device))


def default_start_method(device: str) -> Literal["fork", "spawn"]:
    """Fork on Linux for CPUs, spawn otherwise: a GPU driver does not work after a fork."""
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
        self._server: ForkServer | None = None  # forks the workers
        self._children: dict[int, WorkerProcess] = {}
        self._lock = threading.Lock()
        self._runs = 0
        self._singletons: dict[Any, Any] = {}

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
        """Calls `function(*args, **kwargs)` on the first `ranks` workers, in a new process group.

        To pass keyword arguments with the names of those below to the function, use `functools.partial`.

        Args:
            ranks: number of ranks. Default: all.
            timeout: most seconds without an answer or a report, once the workers are up (`math.inf`: no limit).
            echo: whether to show the output of rank 0, live.
            on_report: is called with each value that rank 0's function gives to `report`, live.

        Returns:
            The results in the order of ranks.

        Raises:
            WorkerError: a rank failed, died or did not answer in time. The error is that of the first one.
            TypeError: the function or an argument cannot be pickled.
            ValueError: `ranks` is larger than the pool.
            RuntimeError: the pool is busy with another run.
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
        except BaseException:  # an interrupt, or an error of on_report: the answers are not needed any more
            self.kill()
            raise
        finally:
            self._lock.release()
        return [unpack(answer) for answer in answers]

    def start(self, ranks: int | None = None) -> None:
        """Starts workers without waiting for them. Optional: it only hides the time that they take to start."""
        with self._lock:
            self._start(self.ranks if ranks is None else ranks)

    def kept(self, kind: Callable[[], T]) -> T:
        """The single `kind()` of this pool. The first call makes it; it lives as long as the pool."""
        if kind not in self._singletons:
            self._singletons[kind] = kind()
        value: T = self._singletons[kind]
        return value

    def pids(self) -> list[int]:
        """The PIDs of the workers that run, in the order of ranks."""
        children = [child for _, child in sorted(self._children.items())]
        return [child.process.pid for child in children if child.process.poll() is None]

    def kill(self) -> None:
        """Kills all workers. The pool stays usable."""
        self._drop(self._children.values())

    def close(self) -> None:
        """Ends all workers. Idle ones exit by themselves; the others are killed."""
        self._singletons.clear()
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
        """Starts the fork server, or the first ``count`` workers, without waiting for them."""
        if self._server is not None and not self._server.alive:
            self._drop(self._children.values())
            self._server.close()
            self._server = None
        needed = [c for c in self._children.values() if c.rank < count]
        self._drop([c for c in needed if c.channel.closed or c.process.poll() is not None or c.worn])
        if not self._forks:
            self._add(count)
        elif self._server is None:
            self._server = ForkServer(environment_of(self._threads))

    def _add(self, count: int) -> None:
        """Starts the missing ones of the first ``count`` workers."""
        for rank in range(count):
            if rank in self._children:
                continue
            try:
                self._children[rank] = WorkerProcess(rank, self._threads, self._server)
            except OSError as error:  # no more processes or memory; or the fork server has just died
                output = "" if self._server is None else tail_of(self._server.log)
                raise WorkerError(rank, f"worker {rank} did not start: {error}", output) from error

    def _await_server(self, server: ForkServer, deadline: float) -> None:
        """Waits until the fork server has imported its modules. Raises WorkerError if it ends, or is too late."""
        while not server.up:
            ended = not server.alive
            if ended or time.monotonic() > deadline:
                problem = f"not up after {self._start_timeout:g} s"
                if ended:
                    problem = f"ended with exit code {server.process.poll()}"
                output = tail_of(server.log)
                self._server = None
                server.close()
                raise WorkerError(0, f"workers did not start: the process that forks them: {problem}", output)
            server.listen(_TICK)

    def _await_start(self, count: int) -> None:
        """Waits until the first ``count`` workers have imported torch. Raises WorkerError if one ends, or is too late."""
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
                child, problem = problems[0]
                output = child.output()
                self._drop(child for child in missing if not child.ready)
                raise WorkerError(child.rank, f"worker {child.rank} did not start: {problem}", output)

    def _perform(self, run: _Run, payload: bytes, timeout: float) -> list[memoryview]:
        """Performs a run. Returns the pickled results in the order of ranks. Raises WorkerError."""
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
        """Kills workers and removes them from the pool."""
        children = list(children)
        for child in children:  # all of them first, so that they end at the same time
            child.kill()
        for child in children:
            child.discard()
            self._children.pop(child.rank, None)


_PORTS = range(20_000, 32_000)  # below the ephemeral ports of the system, which gloo takes for its groups


def _free_port() -> int:
    """A port of this machine on which no process listens."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class _Failure:
    """A failure of one rank. See ``WorkerError``."""

    rank: int
    when: float  # time.monotonic(), which all processes of a machine share
    reason: str
    details: str
    plan_error: PlanError | None = None

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key for first causes: ranks that only lost a peer come last; then by time."""
        return bool(LOST_PEER.search(self.details)), self.when


class _Run:
    """The state of one run: which workers have answered, failed, died or become idle."""

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
        self._heard = time.monotonic()  # time of the last answer or report

    def wait(self, timeout: float) -> WorkerError | None:
        """Waits until all ranks have answered, or one has failed, or the time is up.

        Returns:
            The error if the time is up; else None.
        """
        self._heard = time.monotonic()
        while len(self.answers) < len(self.children) and not self._failures:
            remaining = self._heard + timeout - time.monotonic()
            if remaining <= 0:
                return self._too_late(timeout)
            self._handle_messages(min(remaining, _TICK))
        return None

    def leave(self, grace: float) -> None:
        """Tells all ranks to leave the process group, and waits up to ``grace`` seconds until they are idle."""
        self._leaving = True
        for rank in self.answers:
            self.children[rank].channel.post(("finish",))
        deadline = time.monotonic() + (GRACE if self._failures else grace)
        while self._open() and (remaining := deadline - time.monotonic()) > 0:
            self._handle_messages(min(remaining, _TICK))
        if self._echo:
            self._echo.show(last=True)

    def first_failure(self) -> WorkerError | None:
        """The error of the rank that failed first; None if no rank failed."""
        if not self._failures:
            return None
        first = min(self._failures, key=lambda failure: failure.order)
        reason = f"rank {first.rank} of {len(self.children)} {first.reason}"
        if first.plan_error is not None:
            return WorkerError(first.rank, reason, str(first.plan_error), first.plan_error)
        details = [first.details, self.children[first.rank].output()]
        return WorkerError(first.rank, reason, "\n\n".join(part for part in details if part))

    def lost(self, keep_failed: bool) -> list[WorkerProcess]:
        """The workers that cannot be used again: those that are not idle, and failed ones unless ``keep_failed``.

        After a failure on a GPU, the context of the GPU may be broken.
        """
        failed = set() if keep_failed else {failure.rank for failure in self._failures}
        return [child for child in self.children if child.rank not in self._idle or child.rank in failed]

    def _open(self) -> list[WorkerProcess]:
        """The workers that are neither idle nor dead."""
        return [child for child in self.children if child.rank not in self._idle | self._dead]

    def _handle_messages(self, wait: float) -> None:
        """Handles the messages that arrive within ``wait`` seconds, and shows new output of rank 0."""
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
                plan_error = unpack(body) if body else None
                self._failures.append(_Failure(child.rank, when, f"failed: {summary}", details, plan_error))
            elif kind == "idle":
                self._idle.add(child.rank)
            elif kind == "died":
                self._dead.add(child.rank)
                if len(self.answers) < len(self.children):
                    self._failures.append(_Failure(child.rank, time.monotonic(), child.death(), ""))
        if self._echo:
            self._echo.show()

    def _too_late(self, timeout: float) -> WorkerError:
        """Kills the ranks that have not answered. Returns an error with their stacks."""
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
