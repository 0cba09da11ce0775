"""The folder of a training run, and ``run.json`` in it, with which the same command resumes the run.

runs/gpt2/
  run.json          what must not change at a resume: target, settings, rows per step, learning rate, seed
  metrics.jsonl     a line for each step; verdicts.jsonl, timelines.jsonl and starts.jsonl beside it
  report.html       the run, drawn
  step-00000100/    checkpoints
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from meshwright.errors import Findings, PlanError

FILE = "run.json"
_OPTIONS = {
    "global_batch": "--global-batch",
    "lr": "--lr",
    "loss": "--loss",
    "seed": "--set seed=",
    "settings": "--set",
}


@dataclass(frozen=True)
class RunIdentity:
    """What must not change when a run resumes. The layout may change: a checkpoint loads into any layout."""

    target: str
    settings: Mapping[str, Any]
    loss: str | None
    global_batch: int
    lr: float
    seed: int


def folder_of(target: str) -> Path:
    """The default folder of a run.

    >>> folder_of("hf:gpt2"), folder_of("some/rows.py:model")
    (PosixPath('runs/gpt2'), PosixPath('runs/rows-model'))
    """
    name = re.sub(r"\.(py|json)(?=:|$)", "", "/".join(PurePath(target.removeprefix("hf:")).parts[-1:]))
    return Path("runs") / (re.sub(r"[^\w.]+", "-", name).strip("-.") or "run")


def identity_to_resume(folder: Path) -> RunIdentity | None:
    """The identity of the run in a folder. None if the folder has no complete checkpoint, or no valid ``run.json``."""
    from meshwright.checkpoint.folder import newest

    try:
        if newest(folder) is None:
            return None
        return RunIdentity(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no such file, or not ours: there is nothing to compare with
        return None


def read_identity(folder: Path) -> RunIdentity:
    """The identity of the run in a folder. Raises PlanError if the folder has no valid ``run.json``."""
    try:
        return RunIdentity(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        findings = Findings("this command")
        required = f"the {FILE} that meshwright train writes"
        findings.add(where=str(folder / FILE), given="no such file, or another's", required=required, fix="train again")
        raise findings.error() from None


def write_identity(folder: Path, identity: RunIdentity) -> None:
    """Writes ``run.json``. Creates the folder if it does not exist. The rename at the end makes the write atomic."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{FILE}.part"
    temporary.write_text(json.dumps(asdict(identity), indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, folder / FILE)


def check_identity(folder: Path, before: RunIdentity, now: RunIdentity) -> None:
    """Raises PlanError if the command line differs from the run that it would resume.

    Args:
        before: read from ``run.json``.
        now: of the command line.
    """
    findings = Findings("this command")
    saved, current = asdict(before), json.loads(json.dumps(asdict(now), default=str))
    for values in (saved, current):
        for key in ("target", "loss"):  # compare file names without folders: another node may have them elsewhere
            values[key] = PurePath(values[key]).name if values[key] else None
    for key in saved:
        if saved[key] != current[key]:
            findings.add(
                where=_OPTIONS.get(key, "TARGET"),
                given=f"{_shown(current[key])}, but the run in {folder} has {_shown(saved[key])}",
                required="the same value, to resume that run; or another folder",
                fix=f"--out {folder}-2, or --fresh",
            )
    findings.raise_if_any()


def _shown(value: object) -> str:
    return "none" if value is None or value == {} else str(value)


def check_fresh(folder: Path) -> None:
    """Raises PlanError if the launcher may restart the ranks: each restart would then start a new run."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        required = "no --fresh together with --max-restarts: each restart would start a new run"
        raise PlanError.of(
            "this command",
            where="--fresh",
            given="under a launcher that restarts",
            required=required,
            fix=f"--out {folder}-2",
        )


def set_aside(folder: Path) -> Path | None:
    """Renames the folder of a run to ``<name>.old-1`` or the next free number, so that nothing is lost.

    Returns:
        The new path; None if the folder does not exist or is empty.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (other := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(other)
    return other
