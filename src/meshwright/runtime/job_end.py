"""``JobEnd``: an error on one rank ends the job on all ranks within seconds; each raises an error that says why.

    rank 1   ValueError in its forward ─ reports it ─ closes its connections ─ raises ValueError
    rank 0   waits in a collective ················ loses rank 1 ─ looks up why ─ raises RankError: rank 1 failed: ValueError …
    rank 2   computes ·········································· loses rank 0 ─ looks up why ─ raises RankError: rank 1 …

Some errors are raised on all ranks together, after an exchange: for a batch without rows, say. No part of the step has
run then, and a person may catch the error and go on. After any other error the job takes no further step: some ranks have
run a part of one, FSDP2 units are gathered, and transfers are under way. This holds too if every rank has the same error
by itself (a ValueError in the forward, say): then each raises its own.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import torch
import torch.distributed as dist

from meshwright import blame, private
from meshwright.errors import CheckpointError, PlanError, RankError, RowsError, UnfrozenError, source_place
from meshwright.runtime.groups import Groups, backend_of
from meshwright.watch.first_cause import Cause, FirstCause
from meshwright.workers.pool import LOST_PEER

_SHARED: tuple[type[Exception], ...] = (CheckpointError, RowsError, UnfrozenError)  # always raised on all ranks
# texts of errors of gloo and NCCL
_TIMED_OUT = re.compile(r"timed out (waiting|after)|wait timeout|application timeout", re.IGNORECASE)
_MOST = 2_000  # characters of an error that are sent to other ranks: every rank prints them


class JobEnd:
    """Ends a job of several ranks. Created on all ranks at the same time: collective.

    Args:
        groups: the process groups of the job.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._over = ""  # why the job has ended; empty while it runs
        self._told: Exception | None = None  # an error of this rank that all ranks know of
        self._first: FirstCause | None = None
        if dist.get_world_size() > 1 and backend_of(groups.hosts.get(""), torch.device("cpu")) == "gloo":
            name = [uuid4().hex]
            dist.broadcast_object_list(name, src=0, group=groups.hosts.get(""), device=torch.device("cpu"))
            self._first = FirstCause(private.job_store(), name[0], dist.get_rank(), dist.get_world_size())

    @contextmanager
    def within(self, step: int, *alike: type[Exception]) -> Iterator[None]:
        """A context for code that needs all ranks: an error on this rank ends the job on all ranks.

        Args:
            step: as errors call it.
            alike: types of errors that all ranks raise together, after an exchange. These do not end the job.

        Raises:
            RankError: another rank failed, or has ended; or the job ended before.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            if self._first is None or self._over or self._all_raise(error, alike):
                raise
            if (other := self._end(error, step)) is not None:
                raise other from error
            raise

    def told(self, error: Exception | None) -> None:
        """Notes an error of this rank, of any type, that is reported to all ranks."""
        self._told = error

    def _all_raise(self, error: BaseException, alike: tuple[type[Exception], ...]) -> bool:
        """Whether all ranks raise this error, after an exchange."""
        # Code of the model that is refused raises this only on the ranks that run it.
        of_some = isinstance(error, PlanError) and error.subject == "this model"
        return error is self._told or (isinstance(error, (*_SHARED, *alike)) and not of_some)

    def check(self) -> None:
        """Raises RankError if the job has ended."""
        if self._over:
            raise RankError(self._over)

    def _end(self, error: BaseException, step: int) -> RankError | None:
        """Ends the job: reports the error to the other ranks, and closes the connections to them.

        Returns:
            The error of the other rank, if ``error`` follows from its loss; else None.
        """
        assert self._first is not None
        lost = _is_lost_peer(error)
        cause_here = Cause(self._groups.rank, step, _text(error))
        self._first.report(cause_here, lost=lost)
        self._close()
        cause = self._first.wait() if lost else cause_here
        if isinstance(cause, Cause):
            step, cause = cause.step, f"rank {cause.rank} failed: {cause.text}"
        self._over = f"step {step}: {cause}"
        if lost:
            return RankError(self._over, first=True)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"on rank {cause_here.rank}, in step {cause_here.step}: this ends the job, on all ranks")
        return None

    def _close(self) -> None:
        """Closes the connections of this rank, so that ranks that wait for it stop waiting."""
        assert self._first is not None
        self._first.close_connections()
        for group in (dist.group.WORLD, *self._groups.joined_groups):
            if group is not None and backend_of(group, self._groups.device) == "nccl":
                with suppress(Exception):
                    group.abort()


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error is one of a collective that has lost another rank, or has an error like that as its cause."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or LOST_PEER.search(text) or _TIMED_OUT.search(text):
            return True
        error = error.__cause__ or error.__context__
    return False


def _text(error: BaseException) -> str:
    """An error for other ranks: its message, and the line of code that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    file, _, line = blame.line_of(error).rpartition(":")
    shown = text if len(text) <= _MOST else text[:_MOST] + " …"
    return f"{shown} (at {source_place(file, int(line))})" if file else shown


__all__ = ["JobEnd"]
