"""What is wrong with a plan: every problem at once, each with its place and a fix that can be pasted.

Checking code adds to a `Findings` and goes on; `raise_if_any` raises one `PlanError` at the end. So a person
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
    """One problem. All four are text for a person; `fix` is text to paste, or empty where there is none."""

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
        findings: the problems, in the order in which they were found; never empty.
        subject: what the problems are in, as the first line names it.
    """

    def __init__(self, findings: Iterable[Finding], subject: str = "this plan") -> None:
        self.findings = tuple(findings)
        self.subject = subject
        super().__init__(self.findings, subject)  # the arguments, so that it survives pickling between processes

    @classmethod
    def of(cls, subject: str, *, where: str, given: str, required: str, fix: str = "") -> PlanError:
        """The error of one problem, if no other can stand beside it. See `Findings.add`."""
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
        step: in which it happened; the parameters are those of the step before.
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
    """Ranks that should hold the same bits, or do the same, differ. Raised on every rank that can be told.

    Attributes:
        step: the first step that compared them and saw it; the optimizer has not stepped since.
        differences: what differs, with the ranks, one line each.
    """

    def __init__(self, step: int, differences: Sequence[str], fix: str) -> None:
        super().__init__(step, tuple(differences), fix)  # the arguments, so that it survives pickling between processes
        self.step, self.differences, self.fix = step, tuple(differences), fix

    def __str__(self) -> str:
        shown = "\n".join(f"  {line}" for line in self.differences)
        return f"step {self.step}: what should be the same on several ranks is not\n{shown}\n{self.fix}"


class UnfrozenError(RuntimeError):
    """Parameters are trained that were not when the job was made, and stages, or branches, do not send their gradients.
    Raised on every rank, before the optimizer steps.

    Attributes:
        names: the parameters, of this rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.names = names

    def __str__(self) -> str:
        which = few(self.names) if self.names else "parameters of other ranks"
        return (
            f"{which}: requires_grad was not set when the job was made, and what stages and branches send each other was "
            "planned without these gradients. Build the model with them trained, and freeze them after parallelize: "
            "p.requires_grad_(False)"
        )


class RowsError(RuntimeError):
    """The rows of a step cannot be divided, and only the step's values have shown it: the model acts on values of its rows, or
    counts what does not follow from the batch alone. Raised on every rank, before the optimizer steps."""

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
    """What went wrong in a pipeline, with the rank, stage and action in which it did."""


class UncutPathError(StageError):
    """A batch takes another path through the model than the sample's, one that the stages cannot run. Told on every rank before
    anything of the step is done."""


class CheckpointError(PlanError):
    """What is wrong with a checkpoint, or why it does not fit: every problem, told as those of a plan are."""


class Findings:
    """A collector of problems: add all, raise once. False while it is empty."""

    def __init__(self, subject: str = "this plan") -> None:
        self.subject = subject
        self._found: list[Finding] = []

    def add(self, *, where: str, given: str, required: str, fix: str = "") -> None:
        """Note one problem and go on.

        Args:
            where: the place, as exact as is known: ``plan.yaml:3:5 (mesh.tpp)``.
            given: what stands there.
            required: what would be right there.
            fix: text that can be pasted; several lines are kept as a block.
        """
        self._found.append(Finding(where=where, given=given, required=required, fix=fix))

    def extend(self, findings: Iterable[Finding]) -> None:
        """Take over the problems that another check found."""
        self._found.extend(findings)

    def raise_if_any(self) -> None:
        """Raise a `PlanError` with every problem, in order; do nothing where there is none."""
        if self._found:
            raise self.error()

    def error(self) -> PlanError:
        """A `PlanError` with every problem, to raise."""
        return PlanError(self._found, self.subject)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(tuple(self._found))


def nearest(word: str, words: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """The words that are spelt most like ``word``, the nearest first; empty where none is near.

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
    """A place in a source, as it is told: the last two parts of the path name it well enough, and fit a line.

    >>> source_place("/usr/lib/python3/site-packages/transformers/models/llama/modeling_llama.py", 123)
    'llama/modeling_llama.py:123'
    """
    named = "/".join(PurePath(file).parts[-2:]).replace("//", "/")
    return ":".join([named, *(str(number) for number in (line, column) if number is not None)])


def _field(label: str, text: str) -> str:
    # Several lines stand as a block below their label: pasted, they keep their own indentation.
    if "\n" in text:
        return f"{label}:\n{indent(text, '    ')}"
    return f"{label + ':':<{_LABEL}}{text}"
