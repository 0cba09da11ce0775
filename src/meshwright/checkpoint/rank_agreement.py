"""``RankAgreement``: in a save or load, an exception of any rank becomes one CheckpointError on every rank.

    do       each rank calls a function; each rank gets its own result
    gather   each rank calls a function; every rank gets the results of all
    first    rank 0 calls a function; every rank gets its result

All ranks meet at the end of each of these calls. So no rank waits in the next one for a rank that has failed.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.checkpoint.folder import OnProgress, ignore_progress
from meshwright.errors import CheckpointError, Finding, PlanError

T = TypeVar("T")

_WIDTH = 300  # most characters of an exception's text in an error
_SHOWN = 4  # most ranks that an error names one by one


@dataclass(frozen=True)
class RankAgreement:
    """The ranks that take part in a save or load, or one plain process.

    Attributes:
        group: the process group of all ranks; None for a plain process.
        subject: the name of what is saved or loaded, for the first line of an error.
        on_progress: called whenever this process has read or written a part.
    """

    group: dist.ProcessGroup | None
    subject: str = "this checkpoint"
    on_progress: OnProgress = ignore_progress

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def do(self, function: Callable[[], T], failed: Finding) -> T:
        """Calls ``function`` on each rank, and returns its result on this rank. Collective.

        Args:
            failed: the finding to report if the function raises an exception, whose text is added.

        Raises:
            CheckpointError: on every rank, if the function raised an exception on some rank.
        """
        attempt = _Attempt.call(function)
        self._raise_failures(attempt, self._gathered((attempt.findings, attempt.cause)), failed)
        return attempt.value

    def gather(self, function: Callable[[], T], failed: Finding) -> list[T]:
        """Like ``do``, but returns the results of all ranks, in rank order."""
        attempt = _Attempt.call(lambda: self._packed(function()))
        attempts = self._gathered((attempt.findings, attempt.cause, attempt.value))
        self._raise_failures(attempt, [(findings, cause) for findings, cause, _ in attempts], failed)
        return [self._unpacked(value) for *_, value in attempts]

    def first(self, function: Callable[[], T], failed: Finding) -> T:
        """Like ``do``, but calls ``function`` on rank 0 alone, and returns its result on every rank."""
        return self.gather(lambda: function() if self.rank == 0 else None, failed)[0]  # type: ignore[return-value]

    def _packed(self, value: Any) -> Any:
        """The value as bytes. A value that cannot be pickled raises here, as a failure of this rank, not within torch."""
        return value if self.group is None else pickle.dumps(value)

    def _unpacked(self, value: Any) -> Any:
        return value if self.group is None else pickle.loads(value)

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _raise_failures(
        self, attempt: _Attempt, failures: list[tuple[tuple[Finding, ...], str]], failed: Finding
    ) -> None:
        """Raises one CheckpointError with the failures of all ranks, if there are any.

        Args:
            attempt: that of this rank.
            failures: (findings, cause) of each rank. Ranks with an equal cause share one finding.
        """
        findings = list(dict.fromkeys(finding for rank_findings, _ in failures for finding in rank_findings))
        for text in dict.fromkeys(cause for _, cause in failures if cause):
            ranks = [rank for rank, (_, cause) in enumerate(failures) if cause == text]
            findings.append(because(failed, text if self.group is None else f"{_ranks_text(ranks)}: {text}"))
        if not findings:
            return
        if isinstance(attempt.error, KeyboardInterrupt | SystemExit):
            raise attempt.error  # this process ends as it was asked to; the other ranks raise CheckpointError
        raise CheckpointError(findings, self.subject) from attempt.error


@dataclass(frozen=True)
class _Attempt:
    """One call on one rank: the returned value; or the findings of a PlanError; or the text of another exception."""

    value: Any = None
    findings: tuple[Finding, ...] = ()
    cause: str = ""
    error: BaseException | None = None

    @classmethod
    def call(cls, function: Callable[[], Any]) -> _Attempt:
        """Calls the function, and catches every exception."""
        try:
            return cls(function())
        except PlanError as error:
            return cls(findings=error.findings, error=error)
        except BaseException as error:
            return cls(cause=cause(error), error=error)


def cause(error: BaseException) -> str:
    """An exception as one line of text: an OSError's own text; for others, the type and the text.

    For DCP's CheckpointException: the text of the first exception that it contains.
    """
    if failures := getattr(error, "failures", None):  # DCP's CheckpointException, whose module takes a while to import
        return cause(next(iter(failures.values()))[0])
    text = (str(error).strip().splitlines() or [""])[0][:_WIDTH]
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def because(failed: Finding, why: object) -> Finding:
    """The finding, with a reason added to its ``given``."""
    return replace(failed, given=f"{failed.given}: {why}")


@contextmanager
def without_warning() -> Iterator[None]:
    """A context that suppresses DCP's warning that no process group exists.

    Only for the main thread: warning filters apply to all threads of the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def raising_plain_errors() -> Iterator[None]:
    """A context that turns any exception into an OSError with its text.

    For functions that DCP calls: it sends exceptions to other ranks, and hangs if one cannot be pickled.
    """
    try:
        yield
    except Exception as error:
        raise OSError(cause(error)) from error


def _ranks_text(ranks: Sequence[int]) -> str:
    """Such as ``rank 3``, or ``ranks 0, 1, 2, 3 and 4 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:_SHOWN])) + more
