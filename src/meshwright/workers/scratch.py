"""Temporary files without a name: worker processes write to them, and their pool reads them. No file is left on disk."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

_TAIL = 4000  # bytes of output shown in an error


def scratch_file() -> IO[bytes]:
    """Makes a temporary file. Each write appends at its current end, also after a truncation."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def read_from(file: IO[bytes], start: int) -> bytes:
    """Reads from ``start`` to the end. Does not move the file position, which the writer shares."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), max(0, size - start), start)


def tail_of(file: IO[bytes]) -> str:
    """The last bytes of a file, at most ``_TAIL``, as text."""
    start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
    return read_from(file, start).decode(errors="replace").strip()
