"""``Metrics``: writes a line of JSON for each step of a run, and events for TensorBoard. A resumed run continues the files.

{"step": 7, "loss": 2.31, "grad_norm": 0.8, "tokens_per_second": 5200.0, "memory": 310000000, "waiting": 0.04,
 "skipped": 0, "seconds": 0.2, "memory_by_rank": [310000000, 290000000], "time": "2026-01-31T12:00:00.000+00:00"}

Three more files have a line for each step that compared ranks (``verify`` in the plan), for each observed step, and for each
start of the run:

verdicts.jsonl    {"step": 1, "equal": true, "compared": {"parameters": 12, "activations": 8}, "differences": [], "time": …}
timelines.jsonl   {"step": 10, "plan": …, "timeline": …}, where "timeline" is a ``Timeline`` as JSON
starts.jsonl      {"step": 1, "plan": …, "time": …}, where "step" is the first step that was run
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

FILE, VERDICTS, TIMELINES, STARTS = "metrics.jsonl", "verdicts.jsonl", "timelines.jsonl", "starts.jsonl"


class Metrics:
    """The files of a run, which rank 0 writes. Each line is complete before the next step begins.

    Args:
        folder: of the run. It is created if it does not exist.
        step: of the checkpoint that the run resumes from. Lines of later steps are removed, since these steps run again.
        tensorboard: also write events for TensorBoard, to ``folder/tensorboard``.
    """

    def __init__(self, folder: Path, step: int = 0, *, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._before = folder, step
        for file in (FILE, STARTS):
            _truncate(folder / file, step)
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._board = _board(folder, step) if tensorboard else None

    def write(self, progress: Progress) -> None:
        """Adds the line of a step. Numbers that are not finite are null, since JSON has no inf and nan."""
        numbers: dict[str, Any] = {
            "step": progress.step,
            "loss": progress.loss,
            "grad_norm": progress.grad_norm,
            f"{progress.unit}_per_second": progress.rate,
            "memory": progress.memory,
            "waiting": progress.waiting,
            "skipped": progress.skipped,
            "seconds": progress.seconds,
        }
        line = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in numbers.items()}
        if progress.memories:
            line["memory_by_rank"] = list(progress.memories)
        line["time"] = _now()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                if name != "step":
                    self._board.add_scalar(name, value, progress.step)

    def verdict(self, step: int, compared: Mapping[str, int], differences: Sequence[str] = ()) -> None:
        """Adds the result of a comparison of ranks. A resumed run keeps the lines of later steps.

        Args:
            compared: kind → number of values that rank 0 compared.
            differences: one text for each difference.
        """
        line = {"step": step, "equal": not differences, "compared": dict(compared), "differences": list(differences)}
        self._append(VERDICTS, {**line, "time": _now()})

    def start(self, plan: str) -> None:
        """Adds a start of the run. ``plan``: of its steps, as YAML."""
        self._append(STARTS, {"step": self._before + 1, "plan": plan, "time": _now()})

    def timeline(self, step: int, plan: str, timeline: str) -> None:
        """Adds the timeline of an observed step. ``plan`` is YAML, ``timeline`` JSON."""
        self._append(TIMELINES, {"step": step, "plan": plan, "timeline": json.loads(timeline)})

    def _append(self, file: str, line: Mapping[str, Any]) -> None:
        with (self._folder / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(folder: Path, file: str = FILE) -> list[dict[str, Any]]:
    """The lines of one of a run's files, in order. A line that is incomplete is left out. Empty if the file does not exist."""
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
    """Removes lines of later steps, and a line that a killed run left incomplete. The rename makes the change atomic."""
    if not path.exists():
        return
    lines = [line for line in read(path.parent, path.name) if line.get("step", 0) <= step]
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _board(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
