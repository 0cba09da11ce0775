"""``JobEnd``: an error that one rank alone meets ends the job on all ranks, soon, each with an error that says why.

    rank 1   ValueError in its forward ─ tells it ─ closes its connections ─ raises ValueError
    rank 0   waits in a collective ············· loses rank 1 ─ looks up why ─ raises RankError: rank 1 failed: ValueError …
    rank 2   computes ······································· loses rank 0 ─ looks up why ─ raises RankError: rank 1 …

Some errors are raised on all ranks alike, as they have told each other: a batch without rows, say. A person may catch those
and go on, and nothing of a step has been done then. After all others the job takes no further step: some ranks have done a
part of one, FSDP2's units are half gathered, and what was sent is still under way. That holds also if all ranks meet the same
error, each by itself (a ValueError of the forward, say): each raises its own then.
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

_TOLD: tuple[type[Exception], ...] = (CheckpointError, RowsError, UnfrozenError)  # wherever they are raised
_TIMED_OUT = re.compile(r"timed out (waiting|after)|wait timeout|application timeout", re.IGNORECASE)
_MOST = 2_000  # characters of an error that other ranks are told


class JobEnd:
    """Ends a job of several ranks.

    Args:
        groups: of the job; all ranks make this at once.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups, self._over = groups, ""
        self._told: Exception | None = None
        self._first: FirstCause | None = None
        if dist.get_world_size() > 1 and backend_of(groups.hosts.get(""), torch.device("cpu")) == "gloo":
            name = [uuid4().hex]
            dist.broadcast_object_list(name, src=0, group=groups.hosts.get(""), device=torch.device("cpu"))
            self._first = FirstCause(private.job_store(), name[0], dist.get_rank(), dist.get_world_size())

    @contextmanager
    def within(self, step: int, *alike: type[Exception]) -> Iterator[None]:
        """What runs within needs all ranks: an error that this rank alone meets ends the job on all.

        Args:
            step: as errors call it.
            alike: errors that all ranks raise, as they have told each other.

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
        """This error, whichever it is, is told to all ranks."""
        self._told = error

    def _all_raise(self, error: BaseException, alike: tuple[type[Exception], ...]) -> bool:
        # What the model's own code is refused only those ranks see that run it.
        of_one = isinstance(error, PlanError) and error.subject == "this model"
        return error is self._told or (isinstance(error, (*_TOLD, *alike)) and not of_one)

    def check(self) -> None:
        """Raises RankError if the job has ended."""
        if self._over:
            raise RankError(self._over)

    def _end(self, error: BaseException, step: int) -> RankError | None:
        """Tells the other ranks, and closes what connects them with this one. The error of another rank, if this one follows
        from it."""
        assert self._first is not None
        lost = _is_of_another(error)
        mine = Cause(self._groups.rank, step, _told(error))
        self._first.tell(mine, lost=lost)
        self._close()
        cause = self._first.awaited() if lost else mine
        if isinstance(cause, Cause):
            step, cause = cause.step, f"rank {cause.rank} failed: {cause.text}"
        self._over = f"step {step}: {cause}"
        if lost:
            return RankError(self._over, first=True)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"on rank {mine.rank}, in step {mine.step}: this ends the job, on all ranks")
        return None

    def _close(self) -> None:
        assert self._first is not None
        self._first.close_connections()
        for group in (dist.group.WORLD, *self._groups.made):
            if group is not None and backend_of(group, self._groups.device) == "nccl":
                with suppress(Exception):
                    group.abort()


def _is_of_another(error: BaseException | None) -> bool:
    """Whether an error is that of a collective whose other ranks failed."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or LOST_PEER.search(text) or _TIMED_OUT.search(text):
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: BaseException) -> str:
    """An error as other ranks tell it: what it says, and where it came up."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    file, _, line = blame.line_of(error).rpartition(":")
    shown = text if len(text) <= _MOST else text[:_MOST] + " …"
    return f"{shown} (at {source_place(file, int(line))})" if file else shown


__all__ = ["JobEnd"]
