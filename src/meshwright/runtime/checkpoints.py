"""``Checkpoints``: saves and loads a job. DCP and readers of weights are imported at the first call, as they take a while."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from meshwright.generators import Generators
from meshwright.runtime.division import Division
from meshwright.runtime.guard import Guard
from meshwright.runtime.sharded_model import ShardedModel

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers
    from meshwright.checkpoint.folder import OnProgress
    from meshwright.checkpoint.jobs import Owner
    from meshwright.checkpoint.load import LoadResult
    from meshwright.checkpoint.pretrained import Pretrained
    from meshwright.checkpoint.rank_agreement import RankAgreement
    from meshwright.checkpoint.save import Saving
    from meshwright.checkpoint.staging import Staging


class Checkpoints:
    """Saves and loads this rank's part of a job. All ranks call each method together.

    After a load the values of all replicas are equal again, so the guard begins its comparisons anew. ``on_progress`` is called
    whenever this rank has read or written a part of a file.
    """

    def __init__(self, model: ShardedModel, division: Division, guard: Guard, random: Generators) -> None:
        self._model, self._division, self._guard, self._random = model, division, guard, random
        self._saving: Saving | None = None
        self._staging: Staging | None = None  # kept, since the next save reuses its memory

    def save(
        self, folder: str | os.PathLike[str], optimizer: Optimizers, on_progress: OnProgress, *, step: int, scheduler: Any,
        data: Any, extra: Any, keep: int | None, wait: bool,
    ) -> Saving:  # fmt: skip
        """See ``Job.save``."""
        from meshwright.checkpoint import jobs, staging

        self._begin()
        if not wait and self._staging is None:
            self._staging = staging.Staging()
        self._saving = jobs.save(
            self._owner, self._agreement(on_progress), folder, optimizer,
            step=step, scheduler=scheduler, data=data, extra=extra, keep=keep, staging=None if wait else self._staging,
        )  # fmt: skip
        return self._saving

    def saved(self) -> None:
        """See ``Job.saved``."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(
        self, path: str | os.PathLike[str], optimizer: Optimizers, on_progress: OnProgress, *, scheduler: Any, data: Any,
        verify: bool, or_before: bool,
    ) -> LoadResult:  # fmt: skip
        """See ``Job.load``."""
        from meshwright.checkpoint import jobs

        self._begin()
        loaded = jobs.load(
            self._owner, self._agreement(on_progress), path, optimizer,
            scheduler=scheduler, data=data, verify=verify, or_before=or_before,
        )  # fmt: skip
        self._division.settle(loaded.rows)
        self._guard.begin()
        return loaded

    def load_pretrained(self, folder: str | os.PathLike[str], on_progress: OnProgress, *, strict: bool) -> Pretrained:
        """See ``Job.load_pretrained``."""
        from meshwright.checkpoint.pretrained import load_pretrained

        self._begin()
        loaded = load_pretrained(self._model, folder, strict=strict, on_progress=on_progress)
        self._guard.begin()
        return loaded

    def _begin(self) -> None:
        """Finishes the last step and the last save, whose ranks agree over the same group, and reshards the parameters."""
        self._division.finish_step()
        self.saved()
        self._model.reshard()

    def _owner(self) -> Owner:
        from meshwright.checkpoint.jobs import Owner

        return Owner.of_job(self._model, self._random, self._division.rows)

    def _agreement(self, on_progress: OnProgress) -> RankAgreement:
        from meshwright.checkpoint.rank_agreement import RankAgreement

        return RankAgreement(self._model.groups.files, on_progress=on_progress)
