"""Files that commands write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Writes a file completely or not at all: the text goes to a temporary file, which is then renamed.

    Creates the parent folder if it does not exist.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=file.suffix)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(temporary, 0o666 & ~_umask())
    os.replace(temporary, file)


def _umask() -> int:
    """The umask of this process: the permission bits that new files do not get. It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
