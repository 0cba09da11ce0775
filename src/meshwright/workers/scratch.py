"""Files without a name, into which processes write what their pool reads: nothing is left of them."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

_TAIL = 4000  # bytes of output shown in an error


def scratch_file() -> IO[bytes]:
    """A new one; each write goes to what is its end by then."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def read_from(file: IO[bytes], start: int) -> bytes:
    """From ``start`` to the end, without moving the position that the writer shares."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), max(0, size - start), start)


def tail_of(file: IO[bytes]) -> str:
    """The end of what is in it, as text."""
    start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
    return read_from(file, start).decode(errors="replace").strip()
