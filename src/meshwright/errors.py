"""The errors of this package. A `PlanError` reports every problem of a plan at once, with its position and a fix to paste.

Checking code adds problems to a `Findings` and continues; `raise_if_any` raises one `PlanError` at the end. So a person
corrects a plan once, not once per problem.

    findings = Findings()
    findings.add(where="mesh.tpp", given="tpp", required="an axis: dp_shard or tp", fix="tp: 2")
    findings.raise_if_any()

    PlanError: 1 problem in this plan

    1. where:    mesh.tpp
       given:    tpp
       required: an axis: dp_shard or tp
       fix:      tp: 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath
from textwrap import indent
from typing import Any

from meshwright.names import few

_LABEL = 10  # columns: "required: "


@dataclass(frozen=True)
class Finding:
    """One problem. All four attributes are text for a person.

    Attributes:
        where: the position of the problem.
        given: the wrong value there.
        required: what would be right.
        fix: text to paste; empty if there is none.
    """

    where: str
    given: str
    required: str
    fix: str = ""

    def __str__(self) -> str:
        fields = (
            ("where", self.where),
            ("given", self.given),
            ("required", self.required),
            ("fix", self.fix),
        )
        return "\n".join(_field(label, text) for label, text in fields if text)


class PlanError(ValueError):
    """Every problem of a plan.

    Attributes:
        findings: the problems, in the order of the checks; never empty.
        subject: the thing that has the problems, as the first line names it.
    """

    def __init__(self, findings: Iterable[Finding], subject: str = "this plan") -> None:
        self.findings = tuple(findings)
        self.subject = subject
        super().__init__(self.findings, subject)  # the arguments, so that it survives pickling between processes

    @classmethod
    def of(cls, subject: str, *, where: str, given: str, required: str, fix: str = "") -> PlanError:
        """The error of a single problem. For the arguments see `Findings.add`."""
        return cls([Finding(where=where, given=given, required=required, fix=fix)], subject)

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [f"{count} problem{'' if count == 1 else 's'} in {self.subject}"]
        for number, finding in enumerate(self.findings, 1):
            head = f"{number}. "
            lines += ["", head + indent(str(finding), " " * len(head))[len(head) :]]
        return "\n".join(lines)


class NonFiniteError(RuntimeError):
    """The loss or a gradient is nan or infinite, and the plan says ``nonfinite: stop``. Raised on every rank.

    Attributes:
        step: the step in which it happened; the parameters are those after the step before.
        what: the value that is not finite, in words.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, what)
        self.step, self.what = step, what

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.what}; nothing was updated or saved. "
            "With nonfinite: skip in the plan such steps are left out and counted"
        )


class ReplicaError(RuntimeError):
    """Ranks that should hold the same bits, or do the same, differ. Raised on every rank that can be reached.

    Attributes:
        step: the first step whose comparison showed it; the optimizer has not stepped since.
        differences: one line for each difference, with the ranks.
        fix: what to do.
    """

    def __init__(self, step: int, differences: Sequence[str], fix: str) -> None:
        super().__init__(step, tuple(differences), fix)  # the arguments, so that it survives pickling between processes
        self.step, self.differences, self.fix = step, tuple(differences), fix

    def __str__(self) -> str:
        shown = "\n".join(f"  {line}" for line in self.differences)
        return f"step {self.step}: values that should be equal on several ranks differ\n{shown}\n{self.fix}"


class UnfrozenError(RuntimeError):
    """Parameters require gradients that did not when the job was made, so stages or branches do not send their gradients.
    Raised on every rank, before the optimizer steps.

    Attributes:
        names: the parameters of this rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.names = names

    def __str__(self) -> str:
        which = few(self.names) if self.names else "parameters of other ranks"
        return (
            f"{which}: requires_grad was not set when the job was made, so stages and branches do not send each other these "
            "gradients. Build the model with requires_grad set, and freeze parameters after parallelize: "
            "p.requires_grad_(False)"
        )


class RowsError(RuntimeError):
    """The rows of a step cannot be divided, and only the values of the step show it: the model takes a path by values of its
    rows, or counts something that does not follow from the batch alone. Raised on every rank, before the optimizer steps."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"{self.problem}: the gradients of this step are not those of the batch. "
            "rows: whole in the plan runs all rows on every data rank"
        )


class RankError(RuntimeError):
    """Another rank failed within a step, or has ended; or a job is used that has ended so.

    Attributes:
        cause: the step, the rank, and its error, in words.
        first: whether the job has ended just now.
    """

    def __init__(self, cause: str, *, first: bool = False) -> None:
        super().__init__(cause)
        self.cause, self.first = cause, first

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_error, (self.cause, self.first)

    def __str__(self) -> str:
        end = (
            "That ends the job on all ranks" if self.first else "The job has ended with that, and takes no further step"
        )
        return f"{self.cause}\n{end}: start it again, from the last checkpoint"


def _rank_error(cause: str, first: bool) -> RankError:
    return RankError(cause, first=first)


class StageError(RuntimeError):
    """An error in a pipeline, with its rank, stage and action."""


class UncutPathError(StageError):
    """A batch takes a path through the model that the stages cannot run, other than the sample's. Raised on every rank before
    the step begins."""


OF_THE_RUN = (StageError, ReplicaError)
"""Errors of a run and not of its model: a trial, which goes on if the model fails, raises them again."""


class CheckpointError(PlanError):
    """Every problem of a checkpoint, or every reason why it does not fit; reported like those of a plan."""


class Findings:
    """A collector of problems: add all, raise once. False while it is empty."""

    def __init__(self, subject: str = "this plan") -> None:
        self.subject = subject
        self._findings: list[Finding] = []

    def add(self, *, where: str, given: str, required: str, fix: str = "") -> None:
        """Notes one problem.

        Args:
            where: the position, as exact as it is known: ``plan.yaml:3:5 (mesh.tpp)``.
            given: the value there.
            required: what would be right there.
            fix: text to paste; several lines are kept as a block.
        """
        self._findings.append(Finding(where=where, given=given, required=required, fix=fix))

    def extend(self, findings: Iterable[Finding]) -> None:
        """Adds the problems of another check."""
        self._findings.extend(findings)

    def raise_if_any(self) -> None:
        """Raises a `PlanError` with every problem, in order; does nothing if there is none."""
        if self._findings:
            raise self.error()

    def error(self) -> PlanError:
        """A `PlanError` with every problem, not raised yet."""
        return PlanError(self._findings, self.subject)

    def __bool__(self) -> bool:
        return bool(self._findings)

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(tuple(self._findings))


def nearest(word: str, words: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """The words that are spelt most like ``word``, the nearest first; empty if none is near.

    >>> nearest("dp_shrad", ["dp_replicate", "dp_shard", "tp"])
    ('dp_shard',)
    """
    return tuple(get_close_matches(word, list(dict.fromkeys(words)), n=most, cutoff=0.6))


def listing(words: Sequence[str], last: str = "or") -> str:
    """The words as a sentence lists them.

    >>> listing(["shard", "replicate", "whole"])
    'shard, replicate or whole'
    """
    return ", ".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def source_place(file: str, line: int | None = None, column: int | None = None) -> str:
    """A position in a source file for a message: with the last two parts of the path, so that it fits on a line.

    >>> source_place("/usr/lib/python3/site-packages/transformers/models/llama/modeling_llama.py", 123)
    'llama/modeling_llama.py:123'
    """
    named = "/".join(PurePath(file).parts[-2:]).replace("//", "/")
    return ":".join([named, *(str(number) for number in (line, column) if number is not None)])


def _field(label: str, text: str) -> str:
    # Several lines are a block below their label, so that they can be pasted with their own indentation.
    if "\n" in text:
        return f"{label}:\n{indent(text, '    ')}"
    return f"{label + ':':<{_LABEL}}{text}"
