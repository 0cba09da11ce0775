"""Where the profile of this machine is, which ``meshwright calibrate`` measures."""

from __future__ import annotations

import os
from pathlib import Path

CPU_LOCAL = "cpu-local"
"""The name of the profile of this machine."""


def calibrated_file() -> Path:
    """The file of the profile named ``cpu-local``, whether it has been written or not.

    ``$XDG_CONFIG_HOME/meshwright/cpu-local.yaml``; without that variable, ``~/.config/meshwright/cpu-local.yaml`` (XDG Base
    Directory Specification 0.8: a relative path in the variable counts as none).
    """
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = config if config.is_absolute() else Path.home() / ".config"
    return folder / "meshwright" / f"{CPU_LOCAL}.yaml"


def keep_profile(text: str, file: Path) -> None:
    """Writes a profile to a file, whole or not at all; its folder is made.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
