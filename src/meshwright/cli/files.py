"""Files that commands write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Writes a file, whole or not at all; its folder is made where there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=file.suffix)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(temporary, 0o666 & ~_umask())
    os.replace(temporary, file)


def _umask() -> int:
    """What this process takes away from the modes of files that it makes. It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
