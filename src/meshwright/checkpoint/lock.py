"""One run at a time saves in a folder of checkpoints. No tensors, no ranks: rank 0's process does this for its run.

    hold(folder) ─► .lock is made, if there is none ─► a thread counts in it ─► release: it is removed
                    someone's? ─┬─ the holder is dead: taken over
                                └─ it lives: wait a while, and say for whom; then CheckpointError

A holder on this machine is dead if its process is gone. On another machine its count tells: it stands still for as long as
this process has looked. So no two clocks are compared, and a file system that shows changes late (NFS: seconds) is no harm.
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
PATIENCE = 60.0  # seconds to wait for a holder that lives, and to look at the count of one that may not
_BEAT = 5.0  # seconds from one count to the next
_LOOK = 0.2  # seconds between two looks at a lock
_MOMENT = 5.0  # seconds to wait for others that only look at the file


@dataclass(frozen=True)
class Holder:
    """Who holds a folder.

    Attributes:
        key: of this lock alone.
        host, pid: the process.
        machine, started: tell the process from others of its number (see ``identity``).
        since: the host's time, for people.
    """

    key: str
    host: str
    pid: int
    machine: str
    started: str
    since: str

    @classmethod
    def here(cls) -> Holder:
        """This process, with a new key."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pid = os.getpid()
        return cls(uuid4().hex, socket.gethostname(), pid, identity.machine(), identity.started(pid), since)

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        here = Holder.here()
        return (self.host, self.pid, self.machine, self.started) == (here.host, here.pid, here.machine, here.started)

    @property
    def name(self) -> str:
        """For the names of what it is writing."""
        return f"{self.host}-{self.pid}"

    def lives(self) -> bool | None:
        """Whether the process runs; None if this machine cannot tell."""
        if not (self.machine and self.started and self.machine == identity.machine()):
            return None
        return identity.lives(self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}, since {self.since}"


class Lock:
    """A folder that this process holds. In a ``with``, or until ``release``."""

    def __init__(self, path: Path, holder: Holder, file: int | None, beat: float) -> None:
        self.path, self.holder = path, holder
        self._file, self._released = file, threading.Event()
        if file is not None:
            threading.Thread(target=self._count, args=(file, beat), name="meshwright: lock", daemon=True).start()

    def check(self) -> None:
        """Raises CheckpointError if another process has taken the folder over, which took this one for dead."""
        holder, _ = _read(self.path)
        if holder is None or holder.key != self.holder.key:
            given = f"taken over by {holder}" if holder is not None else "the lock is gone"
            required = f"held by {self.holder}"
            raise CheckpointError([Finding(str(self.path), given, required, _fix(self.path))], "this folder")

    def release(self) -> None:
        """Others may hold the folder."""
        if self._file is None or self._released.is_set():
            return
        self._released.set()
        # Who finds the lock of a dead holder before this one's may look at the file just now: only for a moment.
        with contextlib.suppress(OSError, CheckpointError), _alone(self.path, patience=_MOMENT) as is_it:
            if is_it:
                self.check()
                self.path.unlink()

    def _count(self, file: int, beat: float) -> None:
        """Counts in the file that was opened, which is never another's, whatever happens to its name."""
        count = 0
        try:
            while not self._released.wait(beat):
                count += 1
                with contextlib.suppress(OSError):  # a full disk; or another has taken it over, which ``check`` tells
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
    """Holds a folder, which is made if there is none, for this process.

    A process that holds it already does so once more, as long as the first hold lasts.

    Args:
        patience: seconds to wait for the end of another holder.
        beat: seconds from one count to the next.
        tell: is told for whom it waits; default: standard error is.

    Raises:
        CheckpointError: another process holds it, and lives.
        OSError: nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, began = folder / LOCK, time.monotonic()
    seen: tuple[str, float] | None = None  # what was in the lock, and since when
    changed = False
    while True:
        if (lock := _take(path, beat)) is not None:
            return lock
        holder, text = _read(path)
        if text is None:
            continue  # released since
        if holder is not None and holder.is_here:
            return Lock(path, holder, None, beat)
        now, living = time.monotonic(), None if holder is None else holder.lives()
        if seen is None:
            (tell or _tell)(f"{folder} is held by {holder or 'a process that did not say which'}: waiting for its end")
        if seen is None or seen[0] != text:
            changed, seen = seen is not None, (text, now)
        if living is False or (living is None and now - seen[1] >= patience):
            _break(path, holder, text)
        elif now - began >= patience and (living or changed):
            raise CheckpointError([_held(folder, holder)], "this folder")
        else:
            time.sleep(min(_LOOK, patience / 4))


def _held(folder: Path, holder: Holder | None) -> Finding:
    required = "one run at a time: each removes what the other has not finished, or what it keeps no longer"
    return Finding(str(folder), f"held by {holder}", required, _fix(folder / LOCK))


def _fix(path: Path) -> str:
    return f"another folder, {path.parent}-2; or end the other run first. If it has ended: rm {path}"


def _take(path: Path, beat: float) -> Lock | None:
    """The lock, if there was none."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    holder = Holder.here()
    try:
        os.pwrite(file, _text(holder, 0), 0)
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return Lock(path, holder, file, beat)


def _text(holder: Holder, count: int) -> bytes:
    """Of the same length for every count: whoever reads while it is written reads one or the other."""
    return f"{json.dumps(vars(holder))}\n{count:012d}\n".encode()


def _read(path: Path) -> tuple[Holder | None, str | None]:
    """Who holds it, None if that cannot be read; and the text, None if there is no lock."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno in (
            errno.ENOENT,
            errno.ESTALE,
        ):  # stale: NFS's word for a file that was removed while it was open
            return None, None
        raise
    try:
        return Holder(**json.loads(text.splitlines()[0])), text
    except (ValueError, TypeError, IndexError):
        return None, text


def _break(path: Path, holder: Holder | None, text: str) -> None:
    """Removes the lock of a dead holder; not one that another process has made in its place meanwhile."""
    with _alone(path) as is_it:
        if is_it:
            current, now = _read(path)
            if current == holder if holder is not None else now == text:
                path.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """For the time of a block nobody else removes the file that this path names. False if somebody else does for more than
    ``patience`` seconds, or there is none. Without this, one who found a dead holder a moment ago would remove the lock of who
    has taken it over since."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        until = time.monotonic() + patience
        while not _locked(file):
            if time.monotonic() >= until:
                yield False
                return
            time.sleep(0.01)
        yield _is_named(path, file)
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    """Whether nobody else has the file's lock; on a file system that has no such locks, nobody has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_named(path: Path, file: int) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False


def _tell(text: str) -> None:
    print(f"meshwright: {text}", file=sys.stderr, flush=True)
