"""``Mismatch``: a parameter whose part on a rank is not what the recipe says. A sign of a bug."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """A parameter whose part on a rank is not what the recipe says. ``recipe``: what it should hold; ``held``: what it holds;
    both as text."""

    rank: int
    parameter: str
    recipe: str
    held: str
