"""``History``: the contents of a run's folder as data: its steps, its checkpoints, and the list of what is absent.

metrics.jsonl   a line for each step ─► series: loss, grad_norm, rate, memory, waiting, seconds, skipped
step-00000100/  a checkpoint         ─► step, time, size, layout, problems of its files (sizes alone are compared)
run.json        target and settings  ─► about
verdicts.jsonl  a line for each comparison of ranks
timelines.jsonl a line for each step that was observed
starts.jsonl    a line for each start of the run, with its plan
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
from meshwright.train.metrics import STARTS, TIMELINES, VERDICTS, read

_RATE = "_per_second"
SERIES = ("loss", "grad_norm", "rate", "memory", "waiting", "seconds", "skipped")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint.

    Attributes:
        name: of its directory.
        step: number of optimizer steps before the save.
        time: of the save.
        bytes: size of its files.
        mesh: of the job that saved it, as text.
        problem: the problems of its files; empty if there are none.
    """

    name: str
    step: int
    time: str
    bytes: int
    mesh: str
    problem: str = ""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank held: in the last step that reports it, and in the step with the most."""

    last: int
    most: int


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of ranks that should hold equal values, after a step.

    Attributes:
        step, time: of the comparison.
        compared: kind → number of values that rank 0 compared.
        differences: one text for each; empty if all values were equal.
    """

    step: int
    time: str
    compared: Mapping[str, int]
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObservedStep:
    """An observed step.

    Attributes:
        step: its number.
        plan: the plan that it ran under, as YAML.
        timeline: a ``Timeline`` as plain values.
    """

    step: int
    plan: str
    timeline: Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """A start of the run: the first one, or a resume.

    Attributes:
        step: the first step that it ran.
        plan: the plan of its steps, as YAML.
        time: of the start.
    """

    step: int
    plan: str
    time: str


@dataclass(frozen=True)
class History:
    """The contents of a run's folder.

    Attributes:
        folder: its name.
        about: target and settings, as ``train`` wrote them.
        steps: numbers of the steps in the metrics, in order.
        times: the end of each of these steps.
        series: name (one of ``SERIES``) → a value for each step; None if it is not finite, or absent.
        unit: of the rate: ``tokens`` or ``rows``.
        checkpoints: oldest first.
        unfinished: names of checkpoints that were begun and never completed.
        hang: the report of ranks that stopped answering; empty if there is none.
        absent: one line for each kind of data that the folder lacks, with the reason.
        memories: of each rank, from the steps that ran on as many ranks as the last one.
        comparisons: of ranks, in order.
        observed: observed steps, in order.
        starts: of the run, in order.
    """

    folder: str
    about: Mapping[str, Any]
    steps: tuple[int, ...]
    times: tuple[str, ...]
    series: Mapping[str, tuple[float | None, ...]]
    unit: str
    checkpoints: tuple[SavedCheckpoint, ...]
    unfinished: tuple[str, ...]
    hang: str
    absent: tuple[str, ...]
    memories: tuple[RankMemory, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    observed: tuple[ObservedStep, ...] = ()
    starts: tuple[Start, ...] = ()


def history(folder: Path) -> History:
    """Reads the folder of a run. Reads no tensors.

    Raises:
        PlanError: the folder does not exist, or has neither metrics nor a checkpoint.
    """
    lines = read(folder)
    checkpoints = _checkpoints(folder)
    _check(folder, bool(lines), bool(checkpoints))
    unit = next((key.removesuffix(_RATE) for line in lines for key in line if key.endswith(_RATE)), "rows")
    keys = {name: f"{unit}{_RATE}" if name == "rate" else name for name in SERIES}
    series = {name: tuple(line.get(key) for line in lines) for name, key in keys.items()}
    present = {name: values for name, values in series.items() if any(value is not None for value in values)}
    hang = folder / "hang.txt"
    memories, comparisons, observed = _memories(lines), _comparisons(folder), _observed(folder)
    absent = [*_absent(folder, present, checkpoints), *_absent_of_ranks(memories, comparisons, observed)]
    return History(
        folder.name or str(folder),
        _about(folder),
        tuple(line.get("step", 0) for line in lines),
        tuple(line.get("time", "") for line in lines),
        present,
        unit,
        checkpoints,
        unfinished(folder),
        hang.read_text(encoding="utf-8") if hang.is_file() else "",
        tuple(absent),
        memories,
        comparisons,
        observed,
        tuple(Start(line["step"], line["plan"], line["time"]) for line in read(folder, STARTS)),
    )


def _memories(lines: Sequence[Mapping[str, Any]]) -> tuple[RankMemory, ...]:
    """The memory of each rank, from the steps that ran on as many ranks as the last one."""
    by_step = [line["memory_by_rank"] for line in lines if line.get("memory_by_rank")]
    same_size = [memories for memories in by_step if len(memories) == len(by_step[-1])]
    return tuple(RankMemory(of_rank[-1], max(of_rank)) for of_rank in zip(*same_size, strict=True))


def _comparisons(folder: Path) -> tuple[Comparison, ...]:
    return tuple(
        Comparison(line["step"], line["time"], line["compared"], tuple(line["differences"]))
        for line in read(folder, VERDICTS)
    )


def _observed(folder: Path) -> tuple[ObservedStep, ...]:
    return tuple(ObservedStep(line["step"], line["plan"], line["timeline"]) for line in read(folder, TIMELINES))


def _checkpoints(folder: Path) -> tuple[SavedCheckpoint, ...]:
    if newest(folder) is None:
        return ()
    return tuple(
        SavedCheckpoint(
            inspection.path.name, inspection.step, str(inspection.about.get("time", "")), inspection.bytes,
            _mesh_text(inspection.about.get("mesh", {})),
            "; ".join(f"{problem.where}: {problem.given}" for problem in inspection.problems),
        )
        for inspection in inspect(folder, contents=False)
    )  # fmt: skip


def _mesh_text(axes: Mapping[str, int]) -> str:
    """A mesh as text, such as ``dp_shard=2 × tp=2``."""
    if all(size <= 1 for size in axes.values()):
        return "one process"
    return " × ".join(f"{axis}={size}" for axis, size in axes.items())


def _about(folder: Path) -> dict[str, Any]:
    """The values of run.json; empty if it does not exist or is not valid."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _absent(folder: Path, series: Mapping[str, Any], checkpoints: tuple[SavedCheckpoint, ...]) -> list[str]:
    """Lines about absent series, checkpoints and settings."""
    absent = []
    if not series:
        absent.append(f"steps: there is no {METRICS}, which rank 0 writes")
    elif missing := [name for name in SERIES if name not in series]:
        absent.append(f"{', '.join(missing)}: no finite value in {METRICS}")
    if not checkpoints:
        absent.append("checkpoints: none was completed (--save-every saves them during the run)")
    if not _about(folder):
        absent.append("what was trained: there is no run.json, which meshwright train writes")
    return absent


def _absent_of_ranks(memories: Sequence[Any], comparisons: Sequence[Any], observed: Sequence[Any]) -> list[str]:
    """Lines about absent facts of ranks: memory, comparisons, timelines."""
    absent = []
    if not memories:
        absent.append(f"memory of each rank: {METRICS} has none (written by an older version)")
    if not comparisons:
        absent.append("verdicts: ranks were not compared (one rank alone, or verify: 0 in the plan)")
    if not observed:
        absent.append("a step in time: none was observed (meshwright train --observe-every 100)")
    return absent


def _check(folder: Path, metrics: bool, checkpoints: bool) -> None:
    """Raises PlanError if the folder has neither metrics nor checkpoints."""
    findings = Findings("this command")
    if not metrics and not checkpoints:
        given = "no such folder" if not folder.is_dir() else f"neither {METRICS} nor a checkpoint in it"
        findings.add(
            where=str(folder), given=given, required="the folder of a run of meshwright train",
            fix="meshwright train TARGET --out runs/one, then meshwright report runs/one",
        )  # fmt: skip
    findings.raise_if_any()
