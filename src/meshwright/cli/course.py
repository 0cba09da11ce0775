"""A course of training: what is trained on, and where it is kept, so that the same command goes on with it.

runs/gpt2/
  run.json          what must stay the same: target, settings, rows a step, learning rate, seed
  metrics.jsonl     a line a step; verdicts.jsonl, timelines.jsonl beside it
  report.html       all of it, drawn
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
class Same:
    """What a run is, apart from its layout: a checkpoint is gone on from under the same only."""

    target: str
    settings: Mapping[str, Any]
    loss: str | None
    global_batch: int
    lr: float
    seed: int


def folder_of(target: str) -> Path:
    """Where a run goes that is not told where.

    >>> folder_of("hf:gpt2"), folder_of("some/rows.py:model")
    (PosixPath('runs/gpt2'), PosixPath('runs/rows-model'))
    """
    name = re.sub(r"\.(py|json)(?=:|$)", "", "/".join(PurePath(target.removeprefix("hf:")).parts[-1:]))
    return Path("runs") / (re.sub(r"[^\w.]+", "-", name).strip("-.") or "run")


def begun(folder: Path) -> Same | None:
    """The run in a folder, where it has a checkpoint to go on from."""
    from meshwright.checkpoint.folder import newest

    try:
        if newest(folder) is None:
            return None
        return Same(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no such file, or another's: then nothing is known to compare
        return None


def read(folder: Path) -> Same:
    """The run in a folder. Raises PlanError: the folder does not say what it is of."""
    try:
        return Same(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        findings = Findings("this command")
        required = f"the {FILE} that meshwright train writes"
        findings.add(where=str(folder / FILE), given="no such file, or another's", required=required, fix="train again")
        raise findings.error() from None


def write(folder: Path, same: Same) -> None:
    """Says what run a folder has; at no moment half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{FILE}.part"
    aside.write_text(json.dumps(asdict(same), indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(aside, folder / FILE)


def check_same(folder: Path, before: Same, now: Same) -> None:
    """Raises PlanError if a command would go on with a run as if it were another."""
    findings = Findings("this command")
    was, said = asdict(before), json.loads(json.dumps(asdict(now), default=str))
    for key in ("target", "loss"):  # where the file stands is another matter: another node may have it elsewhere
        was[key], said[key] = (PurePath(d[key]).name if d[key] else None for d in (was, said))
    for key in was:
        if was[key] != said[key]:
            findings.add(
                where=_OPTIONS.get(key, "TARGET"),
                given=f"{_shown(said[key])}, where the run in {folder} has {_shown(was[key])}",
                required="the same, to go on with that run; or another folder",
                fix=f"--out {folder}-2, or --fresh",
            )
    findings.raise_if_any()


def _shown(value: object) -> str:
    return "none" if value is None or value == {} else str(value)


def check_fresh(folder: Path) -> None:
    """Raises PlanError if a launcher would start afresh again at each of its restarts."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        required = "no --fresh beside --max-restarts: each restart would begin afresh"
        raise PlanError.of(
            "this command",
            where="--fresh",
            given="under a launcher that restarts",
            required=required,
            fix=f"--out {folder}-2",
        )


def set_aside(folder: Path) -> Path | None:
    """Gives the run in a folder another name, so that nothing is lost; that name, or None where there was none."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (other := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(other)
    return other
