"""Prints the history of a run: a line for each series; memory by rank; comparisons of ranks; observed steps, one of them beside
its prediction; checkpoints; and the list of what is absent.

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

_CELLS = 48  # characters of a series' curve
_BAR = 24  # characters of a full bar of memory
_MANY = 16  # most ranks whose memory gets a line each


@dataclass(frozen=True)
class StepInTime:
    """The timeline of an observed step, and its prediction.

    Attributes:
        step: number of the step.
        measured: the observed timeline.
        predicted: the predicted timeline; None if there is none.
        hardware: the profile of the prediction.
        why: the reason if there is no prediction.
    """

    step: int
    measured: Timeline
    predicted: Timeline | None = None
    hardware: str = ""
    why: str = ""


def drawn(history: History, observed: Sequence[StepInTime] = (), at: int = -1) -> RenderableType:
    """The history of a run as a renderable for rich. ``at``: index of the observed step that is shown in full."""
    steps = history.steps
    reach = f"steps {steps[0]} to {steps[-1]}" if steps else "no step is recorded"
    heading = Text.assemble((history.folder, "bold"), f": {history.about.get('target', 'a run')}, {reach}")
    return Group(
        heading, *_series(history), *_memories(history.memories), *_comparisons(history.comparisons), *_in_time(observed, at),
        *_checkpoints(history), *_rest(history),
    )  # fmt: skip


def chosen(steps: Sequence[StepInTime], step: int | None) -> int:
    """The index of an observed step; of the last one, if ``step`` is None. If a step ran twice, the later run counts.

    Raises:
        PlanError: the step was not observed.
    """
    indices = [i for i, observed in enumerate(steps) if step in (None, observed.step)]
    findings = Findings("this command")
    if step is not None and not indices:
        fix = "meshwright train --observe-every 100"
        if steps:
            fix = f"one of {', '.join(str(observed.step) for observed in steps)}"
        findings.add(where="--step", given=str(step), required="a step that was observed", fix=fix)
    findings.raise_if_any()
    return indices[-1] if indices else -1


def step_names(steps: Sequence[StepInTime]) -> list[str]:
    """A name for each step, such as ``step 3 (first, slowest)``."""
    lengths = [step.measured.length for step in steps]
    attributes: list[list[str]] = [[] for _ in steps]
    if len(steps) > 1:
        attributes[0].append("first")
        attributes[-1].append("last")
        attributes[lengths.index(max(lengths))].append("slowest")
        attributes[lengths.index(min(lengths))].append("fastest")
    return [
        f"step {step.step}" + (f" ({', '.join(words)})" if words else "")
        for step, words in zip(steps, attributes, strict=True)
    ]


def value_text(name: str, value: float, unit: str = "rows") -> str:
    """A value of a series with its unit."""
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
    for name, series_values in history.series.items():
        values = [value for value in series_values if value is not None]
        least, most = min(values), max(values)
        texts = [value_text(name, value, history.unit) for value in (values[0], values[-1], least, most)]
        above = [value - least for value in values] if most > least else [float(least != 0)] * len(values)
        table.add_row(name.replace("_", " "), *texts, sparkline(above, (most - least) or 1.0, _CELLS))
    if history.series:
        yield from (Text(), table)


def _memories(memories: Sequence[RankMemory]) -> Iterator[RenderableType]:
    if not memories:
        return
    last, most = [memory.last for memory in memories], [memory.most for memory in memories]
    if len(memories) > _MANY:
        low_rank, high_rank = most.index(min(most)), most.index(max(most))
        low, high = f"{size_text(most[low_rank])} (rank {low_rank})", f"{size_text(most[high_rank])} (rank {high_rank})"
        text = f"from {low} to {high} of {len(memories)} ranks"
        yield Text(f"\nmemory at most: {text}")
        return
    table = _table("memory", "last", "most", "")
    for rank, one in enumerate(memories):
        bar = "█" * round(_BAR * one.most / (max(most) or 1))
        table.add_row(f"rank {rank}", size_text(last[rank]), size_text(one.most), bar)
    yield from (Text(), table)


def verdict_text(comparisons: Sequence[Comparison]) -> str:
    """The result of all comparisons of ranks, as one line."""
    wrong = [comparison for comparison in comparisons if comparison.differences]
    if wrong:
        return f"ranks differed after step {wrong[-1].step}: {wrong[-1].differences[0]}"
    last, times = comparisons[-1], f"{len(comparisons)} time" + "s" * (len(comparisons) > 1)
    counts = ", ".join(f"{count} {_noun(kind, count)}" for kind, count in last.compared.items())
    return f"ranks were compared {times}, and equal; after step {last.step}: {counts}"


def _noun(kind: str, count: int) -> str:
    """A kind of value as singular or plural, for its number. Kinds are plurals: ``losses``, ``buffers``."""
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
        yield Text("\nnot known", style="bold")
    for line in history.absent:
        yield Text(f"  {line}", style="dim")
