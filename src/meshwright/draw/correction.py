"""Prints what measured steps say of a hardware profile.

steps over  measured  predicted  error  corrected  error
dp_shard=2   32.1 ms    24.0 ms  -25 %    31.2 ms   -3 %

products × 1.08, host × 1.26: steps off by 20% → 8% on average
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import duration_text
from meshwright.hardware.correction import MOST

if TYPE_CHECKING:
    from meshwright.hardware.correction import Correction

_NEAR = 0.02  # |ln| of a factor that is at its limit, from the limit: the search moves in steps as large


def drawn(correction: Correction, profile: str, steps: Sequence[tuple[str, float]]) -> RenderableType:
    """A table with a line for each step, and the factors.

    Args:
        profile: its name.
        steps: (name, measured seconds) of each, in the order of ``correction.seconds``.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("steps over")
    for title in ("measured", "predicted", "error", "corrected", "error"):
        table.add_column(title, justify="right")
    for (name, measured), seconds in zip(steps, correction.seconds, strict=True):
        columns = (text for one in seconds for text in (duration_text(one), f"{100 * (one / measured - 1):+.0f} %"))
        table.add_row(name, duration_text(measured), *columns)
    return Group(
        Text(f"what these runs say of {profile}", style="bold"),
        table,
        Text(correction_text(correction)),
    )


def correction_text(correction: Correction) -> str:
    """The factors of a corrected profile, and the error of the predicted seconds before and after."""
    if not correction.factors:
        return f"it is as exact as they can tell: predicted steps are off by {correction.before:.0%} on average"
    factors = ", ".join(f"{part} × {factor:.2f}" for part, factor in correction.factors.items())
    errors = f"predicted steps off by {correction.before:.0%} → {correction.after:.0%} on average"
    return f"seconds of {factors}: {errors}{_doubt(correction)}"


def _doubt(correction: Correction) -> str:
    """A text for factors at their limit; empty if there are none."""
    limits = {part: factor for part, factor in correction.factors.items() if abs(log(factor)) > log(MOST) - _NEAR}
    if not limits:
        return ""
    return f"\n{', '.join(limits)}: {MOST:g} times is the most that a factor corrects. Is this the profile of these devices?"
