"""``History``: what the folder of a run tells of it, as data: its steps, its checkpoints, and what it does not tell.

metrics.jsonl   a line a step        ─► series: loss, grad_norm, rate, memory, waiting, seconds, skipped
step-00000100/  a checkpoint         ─► step, time, size, layout, whether it is whole (by sizes)
run.json        what is trained      ─► about
hang.txt        a report of ranks that stopped answering
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import newest
from meshwright.checkpoint.inspection import inspect, unfinished
from meshwright.errors import Findings
from meshwright.train.metrics import FILE as METRICS
from meshwright.train.metrics import read

_RATE = "_per_second"
SERIES = ("loss", "grad_norm", "rate", "memory", "waiting", "seconds", "skipped")


@dataclass(frozen=True)
class Saved:
    """A checkpoint. ``mesh``: of the job that saved it, as text; ``problem``: what is wrong with its files, if anything."""

    name: str
    step: int
    time: str
    bytes: int
    mesh: str
    problem: str = ""


@dataclass(frozen=True)
class History:
    """What a run's folder tells.

    Attributes:
        folder: its name; ``about``: target and settings, as ``train`` wrote them.
        steps: that were told, in order; ``times``: when each ended.
        series: by name (``SERIES``), a value a step; None where it was not finite, or not told.
        unit: of the rate: ``tokens`` or ``rows``.
        checkpoints: oldest first; ``unfinished``: names of those that were begun and never completed.
        hang: the report of ranks that stopped answering.
        absent: what this folder does not tell, and why.
    """

    folder: str
    about: Mapping[str, Any]
    steps: tuple[int, ...]
    times: tuple[str, ...]
    series: Mapping[str, tuple[float | None, ...]]
    unit: str
    checkpoints: tuple[Saved, ...]
    unfinished: tuple[str, ...]
    hang: str
    absent: tuple[str, ...]


def history(folder: Path) -> History:
    """What the folder of a run tells. Reads no tensor.

    Raises:
        PlanError: there is no such folder, or neither metrics nor a checkpoint in it.
    """
    lines = read(folder)
    checkpoints = _checkpoints(folder)
    _check(folder, bool(lines), bool(checkpoints))
    unit = next((key.removesuffix(_RATE) for line in lines for key in line if key.endswith(_RATE)), "rows")
    keys = {name: f"{unit}{_RATE}" if name == "rate" else name for name in SERIES}
    series = {name: tuple(line.get(key) for line in lines) for name, key in keys.items()}
    told = {name: values for name, values in series.items() if any(value is not None for value in values)}
    hang = folder / "hang.txt"
    return History(
        folder.name or str(folder),
        _about(folder),
        tuple(line.get("step", 0) for line in lines),
        tuple(line.get("time", "") for line in lines),
        told,
        unit,
        checkpoints,
        unfinished(folder),
        hang.read_text(encoding="utf-8") if hang.is_file() else "",
        tuple(_absent(folder, told, checkpoints)),
    )


def _checkpoints(folder: Path) -> tuple[Saved, ...]:
    if newest(folder) is None:
        return ()
    return tuple(
        Saved(
            one.path.name, one.step, str(one.about.get("time", "")), one.bytes,
            _mesh(one.about.get("mesh", {})),
            "; ".join(f"{problem.where}: {problem.given}" for problem in one.problems),
        )
        for one in inspect(folder, contents=False)
    )  # fmt: skip


def _mesh(axes: Mapping[str, int]) -> str:
    """The mesh of the job that saved it."""
    cut = [f"{axis}={size}" for axis, size in axes.items()]
    return " × ".join(cut) if any(size > 1 for size in axes.values()) else "one process"


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _absent(folder: Path, told: Mapping[str, Any], checkpoints: tuple[Saved, ...]) -> list[str]:
    absent = []
    if not told:
        absent.append(f"steps: there is no {METRICS}, which rank 0 writes")
    elif missing := [name for name in SERIES if name not in told]:
        absent.append(f"{', '.join(missing)}: no finite value in {METRICS}")
    if not checkpoints:
        absent.append("checkpoints: none was completed (--save-every saves some on the way)")
    if not _about(folder):
        absent.append("what was trained: there is no run.json, which meshwright train writes")
    absent.append("memory of each rank: rank 0 tells its own alone")
    absent.append("verdicts of the guard: none is written; a run whose ranks differ ends with an error")
    return absent


def _check(folder: Path, metrics: bool, checkpoints: bool) -> None:
    findings = Findings("this command")
    if not metrics and not checkpoints:
        given = "no such folder" if not folder.is_dir() else f"neither {METRICS} nor a checkpoint in it"
        findings.add(
            where=str(folder), given=given, required="the folder of a run of meshwright train",
            fix="meshwright train TARGET --out runs/one, then meshwright report runs/one",
        )  # fmt: skip
    findings.raise_if_any()
