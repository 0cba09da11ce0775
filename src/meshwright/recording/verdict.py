"""``Verdict``: the result of comparing two recordings, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from meshwright.names import fold_names
from meshwright.recording.pattern import Pattern

Kind = Literal["names", "weights", "rows", "settings", "loss", "gradients", "updates"]
KINDS: tuple[Kind, ...] = ("names", "weights", "rows", "settings", "loss", "gradients", "updates")
"""What is compared, in causal order: a difference of one kind may cause those of later kinds."""


@dataclass(frozen=True)
class TensorDifference:
    """One difference.

    Attributes:
        kind: what differs.
        name: of the parameter; or a text, such as ``loss`` or ``3 of 8 rows``.
        pattern: the relation between the value and the expected value.
        layout: of the parameter, in the recording of many processes.
        detail: more text for a person.
    """

    kind: Kind
    name: str
    pattern: Pattern
    layout: str = ""
    detail: str = ""


@dataclass(frozen=True)
class ExplainedDifferences:
    """Differences of one kind that have the same likely cause.

    Attributes:
        kind: what differs.
        key: of the cause in the table of ``causes``.
        says: the observation and its usual meaning, as a sentence.
        look: places to look at, each a sentence.
        wrong: the differences.
        of: number of compared values of this kind.
        follows: whether an earlier cause may be the reason.
    """

    kind: Kind
    key: str
    says: str
    look: tuple[str, ...]
    wrong: tuple[TensorDifference, ...]
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
    """The result of a comparison. It is true if the run of many processes computes the same as the run of one.

    Attributes:
        one: folder of the recording of one process.
        many: folder of the recording of many processes.
        steps: number of steps that were compared: up to the first that differs.
        judged: kind → (number of compared values, number of right ones).
        causes: of all differences, in causal order.
        notes: facts that are no differences.
    """

    one: str
    many: str
    steps: int
    judged: Mapping[Kind, tuple[int, int]]
    causes: tuple[ExplainedDifferences, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.causes

    def __bool__(self) -> bool:
        return self.passed

    def keys(self) -> list[str]:
        """The keys of the causes."""
        return [cause.key for cause in self.causes]

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain values, for JSON."""
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


def _wrong(wrong: TensorDifference) -> dict[str, Any]:
    pattern = wrong.pattern
    return {
        "name": wrong.name, "pattern": pattern.kind, "error": _number(pattern.error), "factor": _number(pattern.factor),
        "residual": _number(pattern.residual), "dim": pattern.dim, "factors": [_number(f) for f in pattern.factors],
        "order": list(pattern.order), "ranks": list(pattern.ranks), "layout": wrong.layout, "detail": wrong.detail,
    }  # fmt: skip


def _number(value: float | None) -> float | str | None:
    """A number, or the text ``inf``, since JSON has no infinity."""
    return value if value is None or isfinite(value) else "inf"
