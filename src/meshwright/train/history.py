"""``History``: what the folder of a run tells of it, as data: its steps, its checkpoints, and what it does not tell.

metrics.jsonl   a line a step        ─► series: loss, grad_norm, rate, memory, waiting, seconds, skipped
step-00000100/  a checkpoint         ─► step, time, size, layout, whether it is whole (by sizes)
run.json        what is trained      ─► about
verdicts.jsonl  a line for each comparison of ranks
timelines.jsonl a line for each step that was observed
hang.txt        a report of ranks that stopped answering
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import newest
from meshwright.checkpoint.inspection import inspect, unfinished
from meshwright.errors import Findings
from meshwright.train.metrics import FILE as METRICS
from meshwright.train.metrics import TIMELINES, VERDICTS, read

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
class RankMemory:
    """Bytes that a rank held: in the last step that tells it, and at most."""

    last: int
    most: int


@dataclass(frozen=True)
class Comparison:
    """Ranks that should hold the same were compared after a step.

    Attributes:
        compared: kind → how many rank 0 had of it.
        differences: in words; empty where all were equal.
    """

    step: int
    time: str
    compared: Mapping[str, int]
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """A step that was observed. ``timeline``: a ``Timeline`` as plain values; ``plan``: what the step ran under, as YAML."""

    step: int
    plan: str
    timeline: Mapping[str, Any]


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
        memories: of each rank, of those steps that ran on as many ranks as the last.
        comparisons: of what ranks should hold alike, in order.
        observed: steps in time, in order.
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
    memories: tuple[RankMemory, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    observed: tuple[Observed, ...] = ()


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
    memories, comparisons, observed = _memories(lines), _comparisons(folder), _observed(folder)
    absent = [*_absent(folder, told, checkpoints), *_absent_of_ranks(memories, comparisons, observed)]
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
        tuple(absent),
        memories,
        comparisons,
        observed,
    )


def _memories(lines: Sequence[Mapping[str, Any]]) -> tuple[RankMemory, ...]:
    told = [line["memory_by_rank"] for line in lines if line.get("memory_by_rank")]
    alike = [values for values in told if len(values) == len(told[-1])]
    return tuple(RankMemory(of_rank[-1], max(of_rank)) for of_rank in zip(*alike, strict=True))


def _comparisons(folder: Path) -> tuple[Comparison, ...]:
    return tuple(
        Comparison(line["step"], line["time"], line["compared"], tuple(line["differences"]))
        for line in read(folder, VERDICTS)
    )


def _observed(folder: Path) -> tuple[Observed, ...]:
    return tuple(Observed(line["step"], line["plan"], line["timeline"]) for line in read(folder, TIMELINES))


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
    return absent


def _absent_of_ranks(memories: Sequence[Any], comparisons: Sequence[Any], observed: Sequence[Any]) -> list[str]:
    absent = []
    if not memories:
        absent.append(f"memory of each rank: {METRICS} has none (a run of before it was told)")
    if not comparisons:
        absent.append("verdicts: ranks were not compared (one rank alone, or verify: 0 in the plan)")
    if not observed:
        absent.append("a step in time: none was observed (meshwright train --observe-every 100)")
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
