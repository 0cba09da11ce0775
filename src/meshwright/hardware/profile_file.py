"""The file with this machine's profile, which ``meshwright calibrate`` writes."""

from __future__ import annotations

import os
from pathlib import Path

CPU_LOCAL = "cpu-local"
"""The name of the profile of this machine."""


def calibrated_file() -> Path:
    """The path of the profile ``cpu-local``. The file may not exist yet.

    ``$XDG_CONFIG_HOME/meshwright/cpu-local.yaml``. If the variable is unset or is a relative path,
    ``~/.config/meshwright/cpu-local.yaml`` (XDG Base Directory Specification 0.8).
    """
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = config if config.is_absolute() else Path.home() / ".config"
    return folder / "meshwright" / f"{CPU_LOCAL}.yaml"


def keep_profile(text: str, file: Path) -> None:
    """Writes the text of a profile to a file atomically. Creates the folder of the file.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
