"""How the ranks of a save or load agree: an exception of any rank is one CheckpointError on every rank.

    do       each rank works, and keeps what it has made
    gather   each rank works; every rank gets what each has made
    first    rank 0 works; every rank gets what it has made

No rank goes on to the next of these, where it would wait for the others, while another has failed.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.checkpoint.folder import Moved, nobody
from meshwright.errors import CheckpointError, Finding, PlanError

T = TypeVar("T")

_WIDTH = 300  # characters of an exception's text
_SHOWN = 4  # ranks that are named one by one


@dataclass(frozen=True)
class RankAgreement:
    """The processes of a save or load; a plain process is alone.

    Attributes:
        group: of all of them; None for a plain process.
        subject: what problems are in, as errors name it.
        moved: is called whenever this process has read or written a part.
    """

    group: dist.ProcessGroup | None
    subject: str = "this checkpoint"
    moved: Moved = nobody

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def do(self, work: Callable[[], T], failed: Finding) -> T:
        """What this rank makes of its work. Collective.

        Args:
            failed: what is told if the work raises an exception, which is added to it.

        Raises:
            CheckpointError: on every rank: the work of some rank raised an exception.
        """
        attempt = _Attempt.of(work, failed)
        self._settle(attempt, self._all((attempt.findings, attempt.cause)), failed)
        return attempt.value

    def gather(self, work: Callable[[], T], failed: Finding) -> list[T]:
        """What every rank makes of its work, on every rank; else as ``do``."""
        attempt = _Attempt.of(lambda: self._packed(work()), failed)
        told = self._all((attempt.findings, attempt.cause, attempt.value))
        self._settle(attempt, [(findings, cause) for findings, cause, _ in told], failed)
        return [self._unpacked(value) for *_, value in told]

    def first(self, work: Callable[[], T], failed: Finding) -> T:
        """What rank 0 makes of some work, on every rank; else as ``do``."""
        return self.gather(lambda: work() if self.rank == 0 else None, failed)[0]  # type: ignore[return-value]

    def _packed(self, value: Any) -> Any:
        """As bytes, before ranks meet: what cannot be pickled is then this rank's failure, and not one within torch."""
        return value if self.group is None else pickle.dumps(value)

    def _unpacked(self, value: Any) -> Any:
        return value if self.group is None else pickle.loads(value)

    def _all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _settle(self, attempt: _Attempt, told: list[tuple[tuple[Finding, ...], str]], failed: Finding) -> None:
        """Raises what any rank told; equal causes are told once, with the ranks that have them."""
        findings = list(dict.fromkeys(finding for of_rank, _ in told for finding in of_rank))
        for text in dict.fromkeys(cause for _, cause in told if cause):
            ranks = [rank for rank, (_, cause) in enumerate(told) if cause == text]
            findings.append(because(failed, text if self.group is None else f"{_spelled(ranks)}: {text}"))
        if not findings:
            return
        if isinstance(attempt.error, KeyboardInterrupt | SystemExit):
            raise attempt.error  # of this process, and the others know
        raise CheckpointError(findings, self.subject) from attempt.error


@dataclass(frozen=True)
class _Attempt:
    """Some work of one rank: its value, or what was found, or why it failed."""

    value: Any = None
    findings: tuple[Finding, ...] = ()
    cause: str = ""
    error: BaseException | None = None

    @classmethod
    def of(cls, work: Callable[[], Any], failed: Finding) -> _Attempt:
        try:
            return cls(work())
        except PlanError as error:
            return cls(findings=error.findings, error=error)
        except BaseException as error:
            return cls(cause=cause(error), error=error)


def cause(error: BaseException) -> str:
    """An exception as a line: of DCP's, the one that it carries; the system's errors say what they are, others by type."""
    if failures := getattr(error, "failures", None):  # DCP's CheckpointException, whose module takes a while to import
        return cause(next(iter(failures.values()))[0])
    text = (str(error).strip().splitlines() or [""])[0][:_WIDTH]
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def because(failed: Finding, why: object) -> Finding:
    """The finding with its cause."""
    return replace(failed, given=f"{failed.given}: {why}")


@contextmanager
def without_warning() -> Iterator[None]:
    """Around DCP, if it works without a group: it warns that it does. For the main thread: warnings are a process's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def plainly() -> Iterator[None]:
    """Around what DCP calls: it sends exceptions to other ranks, and waits for ever for one that cannot be pickled."""
    try:
        yield
    except Exception as error:
        raise OSError(cause(error)) from error


def _spelled(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:_SHOWN])) + more
