"""The lock of a folder of checkpoints: one run at a time saves there. Rank 0 holds it for its run; no tensors here.

    hold(folder) ─► creates .lock ─► a thread increments a count in the file ─► release() removes the file
                    .lock exists ─┬─ its holder is dead: remove it, and take the lock
                                  └─ its holder lives: wait with a message; then CheckpointError

A holder on this machine is dead if its process has ended. A holder on another machine is dead if its count has not changed
while this process watched it for ``PATIENCE`` seconds. So clocks of two machines are never compared, and a file system that
shows changes seconds late, such as NFS, does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from meshwright import identity
from meshwright.errors import CheckpointError, Finding

LOCK = ".lock"
PATIENCE = 60.0  # seconds to wait for a living holder, and to watch the count of one that may be dead: twelve counts
_BEAT = 5.0  # seconds from one count to the next: rare, as each is a synchronous write
_LOOK = 0.2  # seconds between two looks at a lock of another process
# seconds that a release waits for a process that has locked the file to look at it, which takes milliseconds
_MOMENT = 5.0


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder.

    Attributes:
        key: unique for each lock.
        host, pid: of the process.
        machine, started: distinguish the process from an earlier or later one with the same pid (see ``identity``).
        since: the time of the host's clock, for people.
    """

    key: str
    host: str
    pid: int
    machine: str
    started: str
    since: str

    @classmethod
    def this_process(cls) -> Holder:
        """A holder for this process, with a new key."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pid = os.getpid()
        return cls(uuid4().hex, socket.gethostname(), pid, identity.machine(), identity.started(pid), since)

    @property
    def is_this_process(self) -> bool:
        """Whether the holder is this process."""
        ours = Holder.this_process()
        return (self.host, self.pid, self.machine, self.started) == (ours.host, ours.pid, ours.machine, ours.started)

    @property
    def name(self) -> str:
        """A part of the names of the directories that the process writes."""
        return f"{self.host}-{self.pid}"

    def lives(self) -> bool | None:
        """Whether the process runs; None if this machine cannot tell."""
        if not (self.machine and self.started and self.machine == identity.machine()):
            return None
        return identity.lives(self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}, since {self.since}"


class Lock:
    """A folder that this process holds, until ``release`` or the end of a ``with`` block."""

    def __init__(self, path: Path, holder: Holder, file: int | None, beat: float) -> None:
        self.path, self.holder = path, holder
        self._file, self._released = file, threading.Event()
        if file is not None:
            threading.Thread(target=self._count, args=(file, beat), name="meshwright: lock", daemon=True).start()

    def check(self) -> None:
        """Raises CheckpointError if another process has taken the lock, because it believed this one dead."""
        holder, _ = _read(self.path)
        if holder is None or holder.key != self.holder.key:
            given = f"taken over by {holder}" if holder is not None else "the lock is gone"
            required = f"held by {self.holder}"
            raise CheckpointError([Finding(str(self.path), given, required, _fix(self.path))], "this folder")

    def release(self) -> None:
        """Removes the lock, so that others may hold the folder."""
        if self._file is None or self._released.is_set():
            return
        self._released.set()
        # Another process may have locked the file for a moment, to see whether its holder is dead.
        with contextlib.suppress(OSError, CheckpointError), _exclusive(self.path, patience=_MOMENT) as acquired:
            if acquired:
                self.check()
                self.path.unlink()

    def _count(self, file: int, beat: float) -> None:
        """Increments the count in the open file. This file stays ours, even if another process replaces the one of its name."""
        count = 0
        try:
            while not self._released.wait(beat):
                count += 1
                # OSError: the disk is full; or another process has the lock, which ``check`` reports.
                with contextlib.suppress(OSError):
                    os.pwrite(file, _text(self.holder, count), 0)
                    os.fsync(file)
        finally:
            os.close(file)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.release()


def hold(
    folder: Path, *, patience: float = PATIENCE, beat: float = _BEAT, tell: Callable[[str], None] | None = None
) -> Lock:
    """Takes the lock of a folder for this process. Creates the folder if it does not exist.

    If this process holds the folder already, the returned lock does nothing, and the first one stays in force.

    Args:
        patience: seconds to wait for another holder.
        beat: seconds from one count to the next.
        tell: called with a message if it has to wait. Default: prints to standard error.

    Raises:
        CheckpointError: another process holds the folder, and lives.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, began = folder / LOCK, time.monotonic()
    last_seen: tuple[str, float] | None = None  # the text of the lock, and the time when it was first seen
    changed = False  # whether the text changed while this process watched
    while True:
        if (lock := _take(path, beat)) is not None:
            return lock
        holder, text = _read(path)
        if text is None:
            continue  # released in the meantime
        if holder is not None and holder.is_this_process:
            return Lock(path, holder, None, beat)
        now = time.monotonic()
        living = None if holder is None else holder.lives()
        if last_seen is None:
            (tell or _tell)(f"{folder} is held by {holder or 'an unknown process'}: waiting for its end")
        if last_seen is None or last_seen[0] != text:
            changed, last_seen = last_seen is not None, (text, now)
        is_dead = living is False or (living is None and now - last_seen[1] >= patience)
        if is_dead:
            _break(path, holder, text)
        elif now - began >= patience and (living or changed):
            raise CheckpointError([_held_by_another(folder, holder)], "this folder")
        else:
            time.sleep(min(_LOOK, patience / 4))


def _held_by_another(folder: Path, holder: Holder | None) -> Finding:
    required = "one run at a time: runs would remove each other's unfinished and old checkpoints"
    return Finding(str(folder), f"held by {holder}", required, _fix(folder / LOCK))


def _fix(path: Path) -> str:
    return f"another folder, {path.parent}-2; or end the other run first. If it has ended: rm {path}"


def _take(path: Path, beat: float) -> Lock | None:
    """Creates the lock's file. None if it exists already."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    holder = Holder.this_process()
    try:
        os.pwrite(file, _text(holder, 0), 0)
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return Lock(path, holder, file, beat)


def _text(holder: Holder, count: int) -> bytes:
    """The text of the lock's file. It has the same length for every count, so a reader never sees a part of two texts."""
    return f"{json.dumps(vars(holder))}\n{count:012d}\n".encode()


def _read(path: Path) -> tuple[Holder | None, str | None]:
    """(holder, text of the file). The holder is None if the text is not valid; both are None if the file does not exist."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: on NFS, a file that was removed while it was open
            return None, None
        raise
    try:
        return Holder(**json.loads(text.splitlines()[0])), text
    except (ValueError, TypeError, IndexError):
        return None, text


def _break(path: Path, holder: Holder | None, text: str) -> None:
    """Removes the lock of a dead holder, unless another process has created a new lock in the meantime."""
    with _exclusive(path) as acquired:
        if acquired:
            current_holder, current_text = _read(path)
            unchanged = current_holder == holder if holder is not None else current_text == text
            if unchanged:
                path.unlink(missing_ok=True)


@contextmanager
def _exclusive(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """A context in which no other process removes the file of this name.

    Yields False if another process has this right for more than ``patience`` seconds, or if the file does not exist. Without
    it, a process that saw a dead holder a moment ago could remove the lock of a process that has taken over since.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        until = time.monotonic() + patience
        while not _flock(file):
            if time.monotonic() >= until:
                yield False
                return
            time.sleep(0.01)
        yield _is_named(path, file)
    finally:
        os.close(file)


def _flock(file: int) -> bool:
    """Takes the operating system's lock of a file. False if another process has it. True on file systems without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_named(path: Path, file: int) -> bool:
    """Whether a path still names the open file, and not a newer one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False


def _tell(text: str) -> None:
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
