"""``ForkServer``: a process that imports torch once, and forks the workers of a pool. So workers start with torch imported.

    pool   ── environment, descriptors of the worker ──►   server ── fork ──► worker
           ◄── ("forked", pid) ──────────────────────────────┤
           ◄── ("ended", pid, status) ───────────────────────┘ when a worker has ended

The import of torch and of a job's other modules takes three to seven seconds of one core. Eight workers on two cores would take
four times as long. The server has one thread and does not use a GPU, so a fork of it works. The server ends with its pool, and
its workers end with it.

The standard library's fork server is not used: it runs the main script again in each process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from meshwright.workers.scratch import scratch_file

_MESSAGE_SIZE = 1 << 20
# packages whose import only defines functions and classes
_PRELOADED = ("meshwright", "torch.distributed", "transformers")
# What most workers need: the modules of a job. Their import takes a second, which each worker would spend.
_OF_A_JOB = ("meshwright.planning.resolve", "meshwright.runtime.apply", "meshwright.parity.job")


class ForkServer:
    """The server, in the process of its pool."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.log = scratch_file()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(environment)
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; {main_file()}"
            f"from meshwright.workers.forkserver import main; main({theirs.fileno()}, {_imported()!r})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                start_new_session=True,  # a terminal's interrupt goes to the pool alone
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._closed = False
        self._up = False
        self._forked: dict[int, ForkedWorker] = {}
        self._new: ForkedWorker | None = None

    @property
    def up(self) -> bool:
        """Whether the server has imported its modules and can fork."""
        self.listen()
        return self._up

    @property
    def alive(self) -> bool:
        """Whether the server runs, and its connection is open."""
        return self.process.poll() is None and not self._closed

    def fork(self, descriptors: list[int], environment: Mapping[str, str]) -> ForkedWorker:
        """Forks a worker.

        Args:
            descriptors: of the worker: its socket, the file for its output, the file for its stacks.
            environment: of the worker.

        Raises:
            OSError: the server has ended.
        """
        changed = {k: v for k, v in environment.items() if self._environment.get(k) != v}
        removed = [k for k in self._environment if k not in environment]
        self._new = None
        socket.send_fds(self._socket, [pickle.dumps((changed, removed))], descriptors)
        while self._new is None:
            if self._closed:
                raise OSError("the process that forks workers has gone")
            self.listen(1.0)
        return self._new

    def listen(self, wait: float = 0.0) -> None:
        """Handles the messages that have arrived from the server, or arrive within ``wait`` seconds."""
        with self._lock:
            while not self._closed and select.select([self._socket], [], [], wait)[0]:
                try:
                    message = self._socket.recv(_MESSAGE_SIZE)
                except OSError:
                    message = b""
                if message:
                    self._take(*pickle.loads(message))
                else:
                    self._closed = True
                wait = 0.0

    def close(self) -> None:
        """Ends the server. The pool ends its workers."""
        self._closed = True
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _take(self, kind: str, pid: int = 0, status: int = 0) -> None:
        """Handles one message: ``up``, ``forked`` with a pid, or ``ended`` with a pid and a wait status."""
        if kind == "up":
            self._up = True
        elif kind == "forked":
            self._new = self._forked[pid] = ForkedWorker(self, pid)
        else:
            self._forked.pop(pid).returncode = os.waitstatus_to_exitcode(status)


class ForkedWorker:
    """A forked worker process, with the part of the interface of `subprocess.Popen` that a pool uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        if self.returncode is None:
            self._server.listen()
        if self.returncode is None and not self._server.alive and not _runs(self.pid):
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended. Returns its exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            remaining = 1.0 if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            if self._server.alive:
                self._server.listen(min(remaining, 1.0))
            else:
                time.sleep(min(remaining, 0.02))
        return code


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main_file() -> str:
    """Code that sets ``__file__`` of a worker's main module to that of this process: some tools look up source code by it."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return "" if file is None else f"__file__ = {os.path.abspath(file)!r}; "


def _imported() -> list[str]:
    """The modules of the packages in ``_PRELOADED`` that this process has imported: its workers will need many of them."""
    packages = tuple(f"{name}." for name in _PRELOADED)
    return [name for name, module in sys.modules.items() if name.startswith(packages) and hasattr(module, "__file__")]


# ---- in the server's process ----


def main(descriptor: int, names: list[str]) -> None:
    """Runs the server of a pool; in each forked process, runs a worker.

    Args:
        descriptor: of the socket to the pool.
        names: modules to import.
    """
    pool = socket.socket(fileno=descriptor)
    for name in ("torch.distributed", *_OF_A_JOB, *names):
        with contextlib.suppress(Exception):  # a worker that needs the module raises the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that imported objects stay in memory that workers share
    _say(pool, "up")
    request = _serve(pool)
    if request is not None:
        from meshwright.workers.worker import main as run_worker

        run_worker(*request)


def _serve(pool: socket.socket) -> tuple[int, int] | None:
    """Forks workers on request until the pool is gone.

    Returns:
        In the server: None. In a forked process: the descriptors of its socket and of the file for its stacks.
    """
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        sources: list[Any] = [pool, ended]
        readable, _, _ = select.select(sources, [], [])
        if ended in readable:
            os.read(ended, 4096)
            _tell_ends(pool)
        if pool not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(pool, _MESSAGE_SIZE, 3)
        if not message:
            return None
        changed, removed = pickle.loads(message)
        pid = os.fork()
        _lead_a_group(pid)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (pool.detach(), ended, wake):
                os.close(inherited)
            return _become_worker(descriptors, changed, removed)
        for of_worker in descriptors:
            os.close(of_worker)
        _say(pool, "forked", pid)


def _become_worker(descriptors: list[int], changed: dict[str, str], removed: list[str]) -> tuple[int, int]:
    """Redirects output and sets the environment. Returns the descriptors of the socket and of the file for stacks."""
    channel, output, stacks = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.update(changed)
    for name in removed:
        os.environ.pop(name, None)
    return channel, stacks


def _lead_a_group(pid: int) -> None:
    """Makes a worker the leader of a process group, so that its child processes can be killed with it.

    Both sides of the fork call it, as either may run first.
    """
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _tell_ends(pool: socket.socket) -> None:
    """Sends the pid and the wait status of each worker that has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say(pool, "ended", pid, status)


def _say(pool: socket.socket, *message: Any) -> None:
    with contextlib.suppress(OSError):  # the pool is gone; _serve notices it when it reads requests
        pool.send(pickle.dumps(message))
