"""``WorkerProcess``: a worker process, as the pool sees it: start, messages, stacks, end.

stdout, stderr ─► a temporary file: errors quote its end, and `Echo` shows it live
stack signal   ─► faulthandler writes the stack of each thread into another temporary file
socket         ◄► messages; `exchange` sends and receives those of many workers within a time limit
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

from meshwright.identity import threads_named
from meshwright.workers import worker as worker_module
from meshwright.workers.channel import Channel
from meshwright.workers.forkserver import ForkedWorker, ForkServer, main_file
from meshwright.workers.scratch import read_from, scratch_file, tail_of
from meshwright.workers.worker import LISTENER, STACK_SIGNAL

_END_TIMEOUT = 5.0  # most seconds for a process to end: a killed one takes milliseconds
# The name of the two threads with which a group of gloo runs its collectives. They look a hundred times a second whether there
# is work. A destroyed group keeps them as long as anything refers to it: a graph that a module of an earlier run has in an
# attribute; always, on torch 2.12 and older.
GROUP_THREAD = "pt_gloo_runloop"
_MOST_GROUP_THREADS = 30


class WorkerProcess:
    """One worker process. It has the same rank in every run."""

    def __init__(self, rank: int, threads: int, server: ForkServer | None = None) -> None:
        """Starts the process. ``server``: forks it. None: it is a new interpreter, which imports torch itself."""
        self.rank = rank
        self.greeted = False  # whether it has installed its signal handler
        self.ready = False  # whether it has imported torch
        ours, theirs = socket.socketpair()
        self.log = scratch_file()
        self._stacks = scratch_file()
        with theirs:
            self.process = _start(threads, server, [theirs.fileno(), self.log.fileno(), self._stacks.fileno()])
        self.channel = Channel(ours)
        self._killed = False

    @property
    def worn(self) -> bool:
        """Whether groups of earlier runs have left many threads in the process."""
        return threads_named(self.process.pid, GROUP_THREAD) > _MOST_GROUP_THREADS

    def kill(self) -> None:
        """Kills the process and the processes that it has started."""
        if not self._killed:  # only once: later, another process may have this PID
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kills the process, and closes its socket and its files."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT)
        self.channel.close()
        self.log.close()
        self._stacks.close()

    def death(self) -> str:
        """How the process ended, as text."""
        try:
            code = self.process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"(process {self.process.pid}) closed its connection to the pool"
        if code >= 0:
            return f"died: process {self.process.pid} ended with exit code {code}"
        hint = " (by hand, or because memory ran out)" if -code == signal.SIGKILL else ""
        return f"died: process {self.process.pid} was killed by {signal.Signals(-code).name}{hint}"

    def clear_output(self) -> None:
        """Deletes the output of earlier runs."""
        self.log.truncate(0)

    def output(self) -> str:
        """The end of its output in this run, with a heading; empty if there is none."""
        text = tail_of(self.log)
        return f"Output of rank {self.rank}, its end:\n{text}" if text else ""

    def ask_for_stacks(self) -> None:
        """Sends the signal on which faulthandler writes the stack of each thread into a file."""
        if self.greeted and self.process.poll() is None:
            self._stacks.truncate(0)
            os.kill(self.process.pid, STACK_SIGNAL)

    def stacks(self) -> str:
        """The stacks that it has written since ``ask_for_stacks``."""
        return read_from(self._stacks, 0).decode(errors="replace")


class Echo:
    """Shows a growing log file on this process's standard output."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log = log
        self._shown = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, last: bool = False) -> None:
        """Shows the output since the last call."""
        new = read_from(self._log, self._shown)
        self._shown += len(new)
        text = self._decoder.decode(new, final=last)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def _start(threads: int, server: ForkServer | None, descriptors: list[int]) -> subprocess.Popen | ForkedWorker:
    """Starts a worker. ``descriptors``: of its socket, the file for its output, the file for its stacks."""
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
        # In a new session, a terminal's interrupt goes only to the pool, which then kills all workers; and the processes that a
        # worker starts can be killed with it.
        start_new_session=True,
    )


def environment_of(threads: int) -> dict[str, str]:
    """The environment of a worker with ``threads`` threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # Without this, gloo looks up the name of this machine, which fails on some machines.
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


def exchange(children: list[WorkerProcess], wait: float) -> list[tuple[WorkerProcess, tuple[Any, ...], memoryview]]:
    """Writes and reads messages of workers.

    Waits up to ``wait`` seconds until a socket can be read or written.

    Returns:
        (worker, head, body) of each message. The last message of a worker that is gone has the head ``("died",)``.
    """
    with selectors.DefaultSelector() as selector:
        for child in children:
            writes = selectors.EVENT_WRITE if child.channel.pending else 0
            if not child.channel.closed:
                selector.register(child.channel, selectors.EVENT_READ | writes)
        selector.select(wait)
    messages: list[tuple[WorkerProcess, tuple[Any, ...], memoryview]] = []
    for child in children:
        exited = child.process.poll() is not None  # checked before reading: its last messages are read below
        if not child.channel.closed:
            child.channel.flush()
        received = [] if child.channel.closed else child.channel.receive()
        messages += [(child, head, body) for head, body in received]
        if child.channel.closed or (exited and not received):
            messages.append((child, ("died",), memoryview(b"")))
    return messages


def stacks_of(children: list[WorkerProcess]) -> dict[int, str]:
    """Rank → the current stacks of its process, as text."""
    for child in children:
        child.ask_for_stacks()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not all(child.stacks() for child in children):
        time.sleep(0.02)
    time.sleep(0.05)  # so that a stack that is being written is complete
    return {child.rank: _readable(child.stacks()) for child in children}


def _readable(dump: str) -> str:
    """A dump of faulthandler, without the threads and frames of this package."""
    blocks = []
    for block in re.split(r"\n\s*\n", dump.strip()):
        lines = block.splitlines()
        internal = [line for line in lines if f'"{worker_module.__file__}"' in line]
        if any(line.endswith("in listen") for line in internal) or LISTENER in lines[0]:
            continue
        internal += [line for line in lines if 'File "<string>", line 1 in <module>' in line]
        blocks.append("\n".join(line for line in lines[1:] if line not in internal))
    return "\n\n".join(block for block in blocks if block) or "  (unknown: it did not answer a signal)"
