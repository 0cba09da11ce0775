"""The history of a run for the terminal: a line a series, from the first step to the last; memory by rank; what came of
comparing ranks; the steps that were observed, and one of them beside the same predicted; its checkpoints; what is not told.

loss      2.71 → 0.84    █▇▆▅▄▃▃▂▂▁▁
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text, duration_text, size_text
from meshwright.draw.text import sparkline
from meshwright.draw.timeline import Timeline, differences
from meshwright.errors import Findings

if TYPE_CHECKING:  # histories are read where torch is loaded
    from meshwright.train.history import Comparison, History, RankMemory

_CELLS = 48
_MANY = 16  # ranks that are told one by one


@dataclass(frozen=True)
class StepInTime:
    """A step of a run as it was observed, and the same predicted.

    Attributes:
        step: which.
        predicted: None where it is not known; ``why`` not, then.
        hardware: what it was predicted for.
    """

    step: int
    measured: Timeline
    predicted: Timeline | None = None
    hardware: str = ""
    why: str = ""


def drawn(history: History, observed: Sequence[StepInTime] = (), at: int = -1) -> RenderableType:
    """A run. ``at``: of the observed steps the one that is told in full."""
    steps = history.steps
    reach = f"steps {steps[0]} to {steps[-1]}" if steps else "no step is told"
    heading = Text.assemble((history.folder, "bold"), f": {history.about.get('target', 'a run')}, {reach}")
    return Group(
        heading, *_series(history), *_memories(history.memories), *_comparisons(history.comparisons), *_in_time(observed, at),
        *_checkpoints(history), *_rest(history),
    )  # fmt: skip


def chosen(steps: Sequence[StepInTime], step: int | None) -> int:
    """The index of a step that was observed; the last, if none is named. A step that ran twice: as it ran last.

    Raises:
        PlanError: that step was not observed.
    """
    found = [i for i, one in enumerate(steps) if step in (None, one.step)]
    findings = Findings("this command")
    if step is not None and not found:
        findings.add(
            where="--step", given=str(step), required="a step that was observed",
            fix=f"one of {', '.join(str(one.step) for one in steps)}" if steps else "meshwright train --observe-every 100",
        )  # fmt: skip
    findings.raise_if_any()
    return found[-1] if found else -1


def step_names(steps: Sequence[StepInTime]) -> list[str]:
    """``step 3 (first)`` …: each step, and what it is among those that were observed."""
    lengths = [one.measured.length for one in steps]
    whats: list[list[str]] = [[] for _ in steps]
    if len(steps) > 1:
        whats[0].append("first")
        whats[-1].append("last")
        whats[lengths.index(max(lengths))].append("slowest")
        whats[lengths.index(min(lengths))].append("fastest")
    return [
        f"step {one.step}" + (f" ({', '.join(what)})" if what else "") for one, what in zip(steps, whats, strict=True)
    ]


def value_text(name: str, value: float, unit: str = "rows") -> str:
    """A value of a series in its unit."""
    if name == "memory":
        return size_text(value)
    if name == "seconds":
        return duration_text(value)
    if name == "waiting":
        return f"{100 * value:.1f} %"
    return f"{count_text(value)} {unit}/s" if name == "rate" else f"{value:.4g}"


def _series(history: History) -> Iterator[RenderableType]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("", "first", "last", "least", "most"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_column("from the first step to the last", no_wrap=True)
    for name, told in history.series.items():
        values = [value for value in told if value is not None]
        least, most = min(values), max(values)
        texts = [value_text(name, value, history.unit) for value in (values[0], values[-1], least, most)]
        above = [value - least for value in values] if most > least else [float(least != 0)] * len(values)
        table.add_row(name.replace("_", " "), *texts, sparkline(above, (most - least) or 1.0, _CELLS))
    if history.series:
        yield from (Text(), table)


def _memories(memories: Sequence[RankMemory]) -> Iterator[RenderableType]:
    if not memories:
        return
    last, most = [one.last for one in memories], [one.most for one in memories]
    if len(memories) > _MANY:
        low, high = min(range(len(most)), key=most.__getitem__), max(range(len(most)), key=most.__getitem__)
        text = f"from {size_text(most[low])} (rank {low}) to {size_text(most[high])} (rank {high}) of {len(memories)} ranks"
        yield Text(f"\nmemory at most: {text}")
        return
    table = _table("memory", "last", "most", "")
    for rank, one in enumerate(memories):
        bar = "█" * round(24 * one.most / (max(most) or 1))
        table.add_row(f"rank {rank}", size_text(last[rank]), size_text(one.most), bar)
    yield from (Text(), table)


def verdict_text(comparisons: Sequence[Comparison]) -> str:
    """What came of comparing ranks, in a line."""
    wrong = [one for one in comparisons if one.differences]
    if wrong:
        return f"ranks differed after step {wrong[-1].step}: {wrong[-1].differences[0]}"
    last, times = comparisons[-1], f"{len(comparisons)} time" + "s" * (len(comparisons) > 1)
    counts = ", ".join(f"{count} {_of(kind, count)}" for kind, count in last.compared.items())
    return f"ranks were compared {times}, and equal; after step {last.step}: {counts}"


def _of(kind: str, count: int) -> str:
    """A kind of value, after its number: kinds are plurals, ``losses``, ``buffers``."""
    return kind if count != 1 else kind.removesuffix("es") if kind.endswith("sses") else kind.removesuffix("s")


def _comparisons(comparisons: Sequence[Comparison]) -> Iterator[RenderableType]:
    if comparisons:
        differed = any(one.differences for one in comparisons)
        yield Text(f"\n{verdict_text(comparisons)}", style="bold red" if differed else "green")
        for one in comparisons:
            yield from (Text(f"  step {one.step}: {line}") for line in one.differences)


def _in_time(steps: Sequence[StepInTime], at: int) -> Iterator[RenderableType]:
    if not steps:
        return
    if len(steps) > 1:
        yield from (Text(), _observed(steps))
    step = steps[at]
    measured, predicted = step.measured, step.predicted
    yield Text(f"\nstep {step.step} in time", style="bold")
    if predicted is None:
        table = _table("", "measured")
        for kind, (_, seconds) in differences(measured, measured).items():
            table.add_row(kind, duration_text(seconds))
        yield from (table, Text(f"not predicted: {step.why}", style="dim"))
        return
    table = _table("", f"predicted ({step.hardware})", "measured", "difference")
    pairs = {**differences(predicted, measured), "the step": (predicted.length, measured.length)}
    for kind, (one, other) in pairs.items():
        sign = "+" if other >= one else "−"
        table.add_row(kind, duration_text(one), duration_text(other), f"{sign}{duration_text(abs(other - one))}")
    yield table


def _observed(steps: Sequence[StepInTime]) -> Table:
    table = _table("observed", "a step", "waiting")
    for name, step in zip(step_names(steps), steps, strict=True):
        table.add_row(name, duration_text(step.measured.length), f"{100 * step.measured.idle:.0f} %")
    return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i and title else "left", no_wrap=True)
    return table


def _checkpoints(history: History) -> Iterator[RenderableType]:
    for one in history.checkpoints:
        state = ("all there (sizes)", "green") if not one.problem else (one.problem, "bold red")
        yield Text.assemble(f"\n{one.name}", f"  {one.time}  {size_text(one.bytes)}  {one.mesh}  ", state)
    for name in history.unfinished:
        yield Text(f"{name}: being written, or never completed; no checkpoint", style="dim")


def _rest(history: History) -> Iterator[RenderableType]:
    if history.hang:
        yield Text("\nranks stopped answering: hang.txt has the report", style="bold red")
    if history.absent:
        yield Text("\nnot told", style="bold")
    for line in history.absent:
        yield Text(f"  {line}", style="dim")
