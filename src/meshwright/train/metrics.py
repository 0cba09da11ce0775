"""What a run tells of its steps: a line of JSON each, in a file that goes on where a resumed run goes on; TensorBoard.

{"step": 7, "loss": 2.31, "grad_norm": 0.8, "tokens_per_second": 5200.0, "memory": 310000000, "waiting": 0.04,
 "skipped": 0, "seconds": 0.2, "memory_by_rank": [310000000, 290000000], "time": "2026-01-31T12:00:00.000+00:00"}

Beside it, of the steps in which ranks were compared (``verify`` in the plan) and of those that were observed:

verdicts.jsonl    {"step": 1, "equal": true, "compared": {"parameters": 12, "activations": 8}, "differences": [], "time": …}
timelines.jsonl   {"step": 10, "plan": …, "timeline": …}, the last a ``Timeline`` as its JSON has it
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.errors import Findings
from meshwright.train.progress import Progress

FILE, VERDICTS, TIMELINES = "metrics.jsonl", "verdicts.jsonl", "timelines.jsonl"


class Metrics:
    """Written on one rank. Each line is complete before the next step begins.

    Args:
        folder: of the run; made where there is none.
        step: of the checkpoint that the run resumes from: lines of later steps, which are made anew, are dropped.
        tensorboard: also write events for TensorBoard, to ``folder/tensorboard``.
    """

    def __init__(self, folder: Path, step: int = 0, *, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, path = folder, folder / FILE
        _truncate(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder, step) if tensorboard else None

    def write(self, told: Progress) -> None:
        """A line. What is not finite, which JSON has no word for, is null."""
        line: dict[str, Any] = {
            "step": told.step, "loss": told.loss, "grad_norm": told.grad_norm, f"{told.unit}_per_second": told.rate,
            "memory": told.memory, "waiting": told.waiting, "skipped": told.skipped, "seconds": told.seconds,
        }  # fmt: skip
        kept = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in line.items()}
        if told.memories:
            kept["memory_by_rank"] = list(told.memories)
        kept["time"] = _now()
        self._file.write(json.dumps(kept) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if name != "step":
                    self._board.add_scalar(name, value, told.step)

    def verdict(self, step: int, compared: Mapping[str, int], differences: Sequence[str] = ()) -> None:
        """What came of a comparison of ranks. A resumed run adds its own, and drops none."""
        line = {"step": step, "equal": not differences, "compared": dict(compared), "differences": list(differences)}
        self._add(VERDICTS, {**line, "time": _now()})

    def timeline(self, step: int, plan: str, timeline: str) -> None:
        """A step that was observed. ``timeline``: as JSON; ``plan``: as YAML."""
        self._add(TIMELINES, {"step": step, "plan": plan, "timeline": json.loads(timeline)})

    def _add(self, file: str, line: Mapping[str, Any]) -> None:
        with (self._folder / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Everything is on its way to the disk."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(folder: Path, file: str = FILE) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order; of one that was cut off in the middle, and of none, nothing."""
    try:
        text = (folder / file).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def check_tensorboard() -> None:
    """Raises PlanError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        findings = Findings("this command")
        required = "the package tensorboard, which is an extra"
        fix = "pip install 'meshwright[tensorboard]'"
        findings.add(where="--tensorboard", given="no such package here", required=required, fix=fix)
        findings.raise_if_any()


def _truncate(path: Path, step: int) -> None:
    """Drops lines of later steps, and one that a killed run left unfinished; at no moment is there half a file."""
    if not path.exists():
        return
    kept = [line for line in read(path.parent) if line.get("step", 0) <= step]
    aside = path.with_suffix(".part")
    aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(aside, path)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _board(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
