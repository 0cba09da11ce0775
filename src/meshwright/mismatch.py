"""``Mismatch``: where a rank of a job does not hold what the recipe says. An alarm, and no picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """A parameter of which a rank does not hold what the recipe says. ``recipe``, ``held``: for a person."""

    rank: int
    parameter: str
    recipe: str
    held: str
