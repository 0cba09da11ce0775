"""A worker process, seen from the pool: started, heard, asked where it is, ended.

stdout, stderr ─► a file without a name: its end goes into errors, and `Echo` shows it live
stack signal   ─► faulthandler writes each thread's stack into another such file
socket         ◄► messages; `exchange` moves those of many workers and never waits longer than it is told
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import IO, Any

from meshwright.workers import worker as worker_module
from meshwright.workers.channel import Channel
from meshwright.workers.forkserver import Forked, ForkServer, main_file
from meshwright.workers.scratch import read_from, scratch_file, tail_of
from meshwright.workers.worker import LISTENER, STACK_SIGNAL

_END_TIMEOUT = 5.0  # seconds a process may take to end: killed ones take milliseconds


class WorkerProcess:
    """One process; its rank is the same in every run."""

    def __init__(self, rank: int, threads: int, server: ForkServer | None = None) -> None:
        """``server``: forks it. None: it starts as a new interpreter, and imports torch itself."""
        self.rank = rank
        self.greeted = False  # it has installed its signal handler
        self.ready = False
        ours, theirs = socket.socketpair()
        self.log = scratch_file()
        self._stacks = scratch_file()
        with theirs:
            self.process = _started(threads, server, [theirs.fileno(), self.log.fileno(), self._stacks.fileno()])
        self.channel = Channel(ours)
        self._killed = False

    def kill(self) -> None:
        """End it at once, with the processes it has started."""
        if not self._killed:  # once: later the number may be another process's
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """End it and give up what is held for it."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT)
        self.channel.close()
        self.log.close()
        self._stacks.close()

    def death(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"(process {self.process.pid}) closed its connection to the pool"
        if code >= 0:
            return f"died: process {self.process.pid} ended with exit code {code}"
        hint = " (by hand, or because memory ran out)" if -code == signal.SIGKILL else ""
        return f"died: process {self.process.pid} was killed by {signal.Signals(-code).name}{hint}"

    def clear_output(self) -> None:
        """Forget what it printed before this run."""
        self.log.truncate(0)

    def output(self) -> str:
        """The end of what it printed in this run."""
        text = tail_of(self.log)
        return f"Output of rank {self.rank}, its end:\n{text}" if text else ""

    def ask_for_stacks(self) -> None:
        """faulthandler writes each thread's stack to the file when the signal comes."""
        if self.greeted and self.process.poll() is None:
            self._stacks.truncate(0)
            os.kill(self.process.pid, STACK_SIGNAL)

    def stacks(self) -> str:
        """What it has written since it was asked."""
        return read_from(self._stacks, 0).decode(errors="replace")


class Echo:
    """Shows a growing log on this process's standard output."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log = log
        self._shown = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, last: bool = False) -> None:
        """Show what is new."""
        new = read_from(self._log, self._shown)
        self._shown += len(new)
        text = self._decoder.decode(new, final=last)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def _started(threads: int, server: ForkServer | None, descriptors: list[int]) -> subprocess.Popen | Forked:
    if server is not None:
        return server.fork(descriptors, environment_of(threads))
    channel, log, stacks = descriptors
    command = (
        f"import sys; sys.path[:] = {sys.path!r}; {main_file()}"
        f"from meshwright.workers.worker import main; main({channel}, {stacks})"
    )
    return subprocess.Popen(
        [sys.executable, "-u", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[channel, stacks],
        env=environment_of(threads),
        # Its own session: a terminal's interrupt goes to the pool alone, which then kills all; and
        # whatever the worker starts can be killed with it.
        start_new_session=True,
    )


def environment_of(threads: int) -> dict[str, str]:
    """Of a worker that computes with so many threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # gloo otherwise looks up this machine's own name, which fails on some.
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


def exchange(children: list[WorkerProcess], wait: float) -> list[tuple[WorkerProcess, tuple[Any, ...], memoryview]]:
    """Wait for something to move, then write and read what can be; a child that is gone says "died" last."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            writes = selectors.EVENT_WRITE if child.channel.pending else 0
            if not child.channel.closed:
                selector.register(child.channel, selectors.EVENT_READ | writes)
        selector.select(wait)
    heard: list[tuple[WorkerProcess, tuple[Any, ...], memoryview]] = []
    for child in children:
        exited = child.process.poll() is not None  # asked first: what it said before is still to be read
        if not child.channel.closed:
            child.channel.flush()
        messages = [] if child.channel.closed else child.channel.receive()
        heard += [(child, head, body) for head, body in messages]
        if child.channel.closed or (exited and not messages):
            heard.append((child, ("died",), memoryview(b"")))
    return heard


def stacks_of(children: list[WorkerProcess]) -> dict[int, str]:
    """The stacks that processes are in, by rank."""
    for child in children:
        child.ask_for_stacks()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not all(child.stacks() for child in children):
        time.sleep(0.02)
    time.sleep(0.05)  # what has begun to be written is complete by then
    return {child.rank: _readable(child.stacks()) for child in children}


def _readable(dump: str) -> str:
    """A faulthandler dump without the threads and frames that are the worker's own."""
    kept = []
    for block in re.split(r"\n\s*\n", dump.strip()):
        lines = block.splitlines()
        internal = [line for line in lines if f'"{worker_module.__file__}"' in line]
        if any(line.endswith("in listen") for line in internal) or LISTENER in lines[0]:
            continue
        internal += [line for line in lines if 'File "<string>", line 1 in <module>' in line]
        kept.append("\n".join(line for line in lines[1:] if line not in internal))
    return "\n\n".join(block for block in kept if block) or "  (unknown: it did not answer a signal)"
