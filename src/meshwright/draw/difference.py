"""Prints the difference of two plans as a waterfall: the bar of each term begins where the previous one ends.

                       a.yaml   b.yaml  difference
compute               1.20 ms  0.80 ms    −0.40 ms          ▒▒▒▒▒▒▒▒
communication over tp       –  0.30 ms    +0.30 ms          ██████
a step                1.20 ms  1.10 ms    −0.10 ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import duration_text, size_text

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.difference import Difference, Pair

_WIDE = 36  # columns of the bars
_MINUS = "−"


def drawn(difference: Difference, names: Sequence[str]) -> RenderableType:
    """The difference of two plans as a renderable for rich. ``names``: of the plans, such as their files."""
    first, second = difference.predictions
    heading = Text.assemble((f"{names[0]} → {names[1]}", "bold"), f" on {first.hardware}")
    caption = (
        "memory: of the rank that needs most; seconds: of the rank that ends last; bars: █ more, ▒ less than before"
    )
    parts: list[RenderableType] = [
        heading, *_titled("what the plans say", _settings(difference, names)),
        *_titled("seconds of a step", _waterfall(difference.seconds, names, "a step", duration_text)),
        *_titled("memory at the peak", _waterfall(difference.memory, names, "peak", _size)),
        Text(caption, style="dim"), Text(), _verdict(difference, names),
    ]  # fmt: skip
    for name, prediction in zip(names, (first, second), strict=True):
        if not prediction.fits:
            parts.append(Text(f"{name} does not fit its devices", style="bold red"))
        parts += [Text(f"{name}: {note}", style="dim") for note in prediction.notes]
    return Group(*parts)


def _settings(difference: Difference, names: Sequence[str]) -> RenderableType:
    if not difference.settings:
        return Text("the same")
    table = _table(("", *names), ())
    for key, (first, second) in difference.settings.items():
        table.add_row(key, _setting_text(first), _setting_text(second))
    return table


def _setting_text(value: Any) -> str:
    """A setting in the plan's form, such as ``dp_shard=2, tp=2`` or ``true``; ``–`` for None."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_setting_text(item)}" for key, item in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _waterfall(terms: Mapping[str, Pair], names: Sequence[str], total: str, text: Callable[[float], str]) -> Table:
    """A line for each term, and their sum. The bar of a term goes from the sum before it to the sum after it.

    Args:
        terms: name → (value in the first plan, value in the second).
        names: of the plans.
        total: label of the sum.
        text: formats a value.
    """
    sums = [sum(pair[0] for pair in terms.values())]
    for first, second in terms.values():
        sums.append(sums[-1] + second - first)
    low, high = min(sums), max(sums)
    table = _table(("",), (*names, "difference"))
    table.add_column("", no_wrap=True)
    for (term, (first, second)), begin, end in zip(terms.items(), sums, sums[1:], strict=False):
        start, stop = (round(_WIDE * (value - low) / ((high - low) or 1)) for value in sorted((begin, end)))
        mark, style = ("█", "red") if second > first else ("▒", "green")
        bar = Text.assemble(" " * start, (mark * max(1, stop - start) if second != first else "", style))
        table.add_row(term, *(text(n) if n else "–" for n in (first, second)), _signed(second - first, text), bar)
    table.add_section()
    table.add_row(total, text(sums[0]), text(sums[-1]), _signed(sums[-1] - sums[0], text), "")
    return table


def _verdict(difference: Difference, names: Sequence[str]) -> Text:
    """A sentence about which plan is faster, and by how much."""
    first, second = (prediction.seconds for prediction in difference.predictions)
    faster, slower = (0, 1) if first.seconds <= second.seconds else (1, 0)
    least, most = sorted((first.seconds, second.seconds))
    intervals_overlap = first.high >= second.low and second.high >= first.low
    unsure = ", within their intervals: measure both to be sure" if intervals_overlap else ""
    if least == most:
        return Text("both take the same")
    return Text(f"{names[faster]} takes {100 * (1 - least / most):.0f} % less time than {names[slower]}{unsure}")


def _signed(amount: float, text: Callable[[float], str]) -> str:
    return "–" if not amount else f"{'+' if amount > 0 else _MINUS}{text(abs(amount))}"


def _size(nbytes: float) -> str:
    return size_text(round(nbytes))


def _titled(title: str, table: RenderableType) -> tuple[RenderableType, ...]:
    return Text(), Text(title, style="bold"), table


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in left:
        table.add_column(title)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table
