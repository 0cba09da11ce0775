"""``Verdict``: what two recordings have in common and what not, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from meshwright.names import fold_names
from meshwright.recording.pattern import Pattern

Kind = Literal["names", "weights", "rows", "settings", "loss", "gradients", "updates"]
KINDS: tuple[Kind, ...] = ("names", "weights", "rows", "settings", "loss", "gradients", "updates")
"""What is judged, in the order in which one follows from another."""


@dataclass(frozen=True)
class Wrong:
    """One thing that differs.

    Attributes:
        name: of the parameter; of a loss or rows, what is meant.
        layout: of the parameter on the ranks, as the recording has it.
        detail: what a person may want to know besides.
    """

    kind: Kind
    name: str
    pattern: Pattern
    layout: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Explained:
    """Things that differ in the same way.

    Attributes:
        key: the cause, as the table in ``causes`` has it.
        says: what was found, in a sentence.
        look: where to look, each in a sentence.
        wrong: what differs.
        of: how many of this kind were judged.
        follows: whether a cause before this one may explain it.
    """

    kind: Kind
    key: str
    says: str
    look: tuple[str, ...]
    wrong: tuple[Wrong, ...]
    of: int
    follows: bool = False

    @property
    def names(self) -> str:
        """The names, folded: ``layers.{0…3}.up.weight``."""
        return ", ".join(str(folded) for folded in fold_names([w.name for w in self.wrong]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "key": self.key, "says": self.says, "look": list(self.look), "of": self.of,
            "follows": self.follows, "wrong": [_wrong(w) for w in self.wrong],
        }  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Whether a run computes what one process computes. True where it does.

    Attributes:
        one, many: the recordings.
        steps: how many were compared: up to the first that differs.
        judged: kind → how many were compared, and how many of them are right.
        causes: what differs, in the order in which one follows from another.
        notes: what is right, and worth knowing.
    """

    one: str
    many: str
    steps: int
    judged: Mapping[Kind, tuple[int, int]]
    causes: tuple[Explained, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.causes

    def __bool__(self) -> bool:
        return self.passed

    def keys(self) -> list[str]:
        """The causes by their keys."""
        return [cause.key for cause in self.causes]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "passed": self.passed, "one": self.one, "many": self.many, "steps": self.steps,
            "judged": {kind: {"compared": total, "right": right} for kind, (total, right) in self.judged.items()},
            "causes": [cause.to_dict() for cause in self.causes], "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{'PASSED' if self.passed else 'FAILED'}  {self.many} against {self.one}"]
        for cause in self.causes:
            lines += [f"{cause.kind} ({cause.key}): {cause.names}", f"  {cause.says}"]
        return "\n".join(lines)


def _wrong(wrong: Wrong) -> dict[str, Any]:
    pattern = wrong.pattern
    return {
        "name": wrong.name, "pattern": pattern.kind, "error": _number(pattern.error), "factor": _number(pattern.factor),
        "residual": _number(pattern.residual), "dim": pattern.dim, "factors": [_number(f) for f in pattern.factors],
        "order": list(pattern.order), "ranks": list(pattern.ranks), "layout": wrong.layout, "detail": wrong.detail,
    }  # fmt: skip


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return value if value is None or isfinite(value) else "inf"
