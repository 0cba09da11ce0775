"""Prints the verdict of comparing two recordings.

runs/eight against runs/one, step 1

           compared  right
weights          26     26
loss              1      1
gradients        26      2

gradients  24 of 26  layers.{0…3}.{up,down}.weight …                                       summed_over_data
           2 × is the size of dp=2: the sum over ranks, where one process has the mean
           look for: a loss multiplied by the number of ranks, …
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.names import fold_names

if TYPE_CHECKING:  # recordings are compared where torch is loaded
    from meshwright.recording.verdict import ExplainedDifferences, TensorDifference, Verdict

_NAMES, _LINES = 4, 6  # most folded names, and most lines, of a cause


def drawn(verdict: Verdict, *, page: str, every: bool = False) -> RenderableType:
    """A verdict as a renderable for rich.

    Args:
        verdict: the result of the comparison.
        page: the page of the documentation that explains causes.
        every: print a line for each difference, not only for the first ones of a cause.
    """
    parts: list[RenderableType] = [
        Text(f"{verdict.many} against {verdict.one}, {_steps(verdict.steps)}", style="bold"),
        Text(),
    ]
    parts.append(_counts(verdict))
    for cause in verdict.causes:
        parts += [Text(), *_cause(cause, every)]
    parts.append(Text())
    if verdict.passed:
        parts.append(Text.assemble(("PASSED", "bold green"), "  both computed the same"))
    else:
        parts.append(
            Text.assemble(("FAILED", "bold red"), f"  {len(verdict.causes)} to look at; what each means: {page}")
        )
    parts += [Text(note, style="dim") for note in verdict.notes]
    return Group(*parts)


def _steps(steps: int) -> str:
    return "step 1" if steps <= 1 else f"steps 1 to {steps}"


def _counts(verdict: Verdict) -> Table:
    table = _table()
    for title, justify in (("", "left"), ("compared", "right"), ("right", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for kind, (total, right) in verdict.judged.items():
        table.add_row(kind, str(total), Text(str(right), style="green" if right == total else "red"))
    return table


def _cause(cause: ExplainedDifferences, every: bool) -> Iterator[RenderableType]:
    count = f"{len(cause.wrong)} of {cause.of}: " if cause.kind in ("weights", "gradients", "updates", "names") else ""
    folded = [str(name) for name in fold_names([wrong.name for wrong in cause.wrong])]
    shown = folded if every else folded[:_NAMES]
    more = f", and {len(folded) - len(shown)} more" if len(folded) > len(shown) else ""
    yield Text.assemble((f"{cause.kind}  ", "bold red"), count, (", ".join(shown) + more, "bold"))
    follows = " (may follow from what stands above)" if cause.follows else ""
    yield Padding.indent(Text(cause.says + follows), 4)
    yield Padding.indent(Text("\n".join(f"look for: {text}" for text in cause.look), style="dim"), 4)
    yield Padding.indent(Text(f"cause: {cause.key}", style="dim"), 4)
    yield Padding.indent(_lines(cause, every), 4)


def _lines(cause: ExplainedDifferences, every: bool) -> Table:
    table = _table()
    for title in ("", "error", "factor", "layout"):
        table.add_column(title, justify="right" if title in ("error", "factor") else "left", no_wrap=True)
    for wrong in cause.wrong if every else cause.wrong[:_LINES]:
        table.add_row(wrong.name, *_numbers(wrong), wrong.detail or wrong.layout)
    if len(cause.wrong) > _LINES and not every:
        table.add_row(f"and {len(cause.wrong) - _LINES} more: --all", "", "", "")
    return table


def _numbers(wrong: TensorDifference) -> tuple[str, str]:
    pattern = wrong.pattern
    error = f"{pattern.error:.1e}" if isfinite(pattern.error) and pattern.error else ""
    return error, f"{pattern.factor:.4f}" if pattern.factor is not None else ""


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
