"""The history of a run for the terminal: a line a series, from the first step to the last; its checkpoints; what is not told.

loss      2.71 → 0.84    █▇▆▅▄▃▃▂▂▁▁
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text, duration_text, size_text
from meshwright.draw.text import sparkline

if TYPE_CHECKING:  # histories are read where torch is loaded
    from meshwright.train.history import History

_CELLS = 48


def drawn(history: History) -> RenderableType:
    """A run."""
    steps = history.steps
    reach = f"steps {steps[0]} to {steps[-1]}" if steps else "no step is told"
    heading = Text.assemble((history.folder, "bold"), f": {history.about.get('target', 'a run')}, {reach}")
    return Group(heading, *_series(history), *_checkpoints(history), *_rest(history))


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
        above = [value - least for value in values] if most > least else [1.0] * len(values)
        table.add_row(name.replace("_", " "), *texts, sparkline(above, (most - least) or 1.0, _CELLS))
    if history.series:
        yield from (Text(), table)


def _checkpoints(history: History) -> Iterator[RenderableType]:
    for one in history.checkpoints:
        state = ("all there (sizes)", "green") if not one.problem else (one.problem, "bold red")
        yield Text.assemble(f"\n{one.name}", f"  {one.time}  {size_text(one.bytes)}  {one.mesh}  ", state)
    for name in history.unfinished:
        yield Text(f"{name}: being written, or never completed; no checkpoint", style="dim")


def _rest(history: History) -> Iterator[RenderableType]:
    if history.hang:
        yield Text("\nranks stopped answering: hang.txt has the report", style="bold red")
    yield Text("\nnot told", style="bold")
    for line in history.absent:
        yield Text(f"  {line}", style="dim")
