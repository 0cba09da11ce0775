"""A process that imports torch once, and forks the workers of a pool, which begin with what it has imported.

    pool   ── environment, descriptors of the worker ──►   server ── fork ──► worker
           ◄── ("forked", pid) ──────────────────────────────┤
           ◄── ("ended", pid, status) ───────────────────────┘ when a worker has ended

To import torch and what a job needs takes a core three to seven seconds: eight workers on two cores would take that four times
over. The server has one thread and has not touched a GPU, so that a fork of it is whole. It ends with its pool, and its
workers end with it.

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
_PRELOADED = ("meshwright", "torch.distributed", "transformers")  # packages that only define something when imported


class ForkServer:
    """The server, seen from its pool. `up` once it can fork."""

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
        self._forked: dict[int, Forked] = {}
        self._new: Forked | None = None

    @property
    def up(self) -> bool:
        """Has it imported all?"""
        self.listen()
        return self._up

    @property
    def alive(self) -> bool:
        """Is it there?"""
        return self.process.poll() is None and not self._closed

    def fork(self, descriptors: list[int], environment: Mapping[str, str]) -> Forked:
        """A worker. ``descriptors``: its socket, the file for its output, the file for its stacks.

        Raises OSError if the server has gone.
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
        """Take what the server has said by now, or says within ``wait`` seconds."""
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
        """End it. Its workers are ended by the pool."""
        self._closed = True
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _take(self, what: str, pid: int = 0, status: int = 0) -> None:
        if what == "up":
            self._up = True
        elif what == "forked":
            self._new = self._forked[pid] = Forked(self, pid)
        else:
            self._forked.pop(pid).returncode = os.waitstatus_to_exitcode(status)


class Forked:
    """A process that the server has forked, with as much of `subprocess.Popen` as a pool uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self._server.listen()
        if self.returncode is None and not self._server.alive and not _runs(self.pid):
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            if self._server.alive:
                self._server.listen(min(left, 1.0))
            else:
                time.sleep(min(left, 0.02))
        return code


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main_file() -> str:
    """Code that gives a worker's main module the file of the one here: some look for the source of a class there."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return "" if file is None else f"__file__ = {os.path.abspath(file)!r}; "


def _imported() -> list[str]:
    """What this process has imported of packages whose import does nothing else: its workers will need much of it."""
    packages = tuple(f"{name}." for name in _PRELOADED)
    return [name for name, module in sys.modules.items() if name.startswith(packages) and hasattr(module, "__file__")]


# ---- in the server's process ----


def main(descriptor: int, names: list[str]) -> None:
    """Be the server of a pool, at the other end of a socket; in each fork of it, be a worker."""
    pool = socket.socket(fileno=descriptor)
    for name in ("torch.distributed", *names):
        with contextlib.suppress(Exception):  # a worker that needs it says what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays shared between workers
    _say(pool, "up")
    request = _serve(pool)
    if request is not None:
        from meshwright.workers.worker import main as work

        work(*request)


def _serve(pool: socket.socket) -> tuple[int, int] | None:
    """Fork what is asked for, until the pool has gone: None. In a fork: the descriptors of its socket and its stacks."""
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        waited_for: list[Any] = [pool, ended]
        readable, _, _ = select.select(waited_for, [], [])
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
        for handed_on in descriptors:
            os.close(handed_on)
        _say(pool, "forked", pid)


def _become_worker(descriptors: list[int], changed: dict[str, str], removed: list[str]) -> tuple[int, int]:
    channel, output, stacks = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.update(changed)
    for name in removed:
        os.environ.pop(name, None)
    return channel, stacks


def _lead_a_group(pid: int) -> None:
    """What a worker starts can be killed with it. On both sides of the fork: whichever comes first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _tell_ends(pool: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say(pool, "ended", pid, status)


def _say(pool: socket.socket, *message: Any) -> None:
    with contextlib.suppress(OSError):  # a pool that has gone is noticed where its requests are read
        pool.send(pickle.dumps(message))
