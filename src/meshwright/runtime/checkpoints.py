"""``Checkpoints``: what a job saves and loads. What it takes (DCP, readers of weights) is imported when it is called for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from meshwright.generators import Generators
from meshwright.runtime.division import Division
from meshwright.runtime.guard import Guard
from meshwright.runtime.held import HeldModel

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers
    from meshwright.checkpoint.folder import Moved
    from meshwright.checkpoint.jobs import Owner
    from meshwright.checkpoint.load import Loaded
    from meshwright.checkpoint.pretrained import Pretrained
    from meshwright.checkpoint.save import Saving
    from meshwright.checkpoint.staging import Staging
    from meshwright.checkpoint.talk import RankAgreement


class Checkpoints:
    """Saves and loads what this rank holds. Values are as they should be after a load, which a guard is told.

    ``moved`` is called whenever this rank has read or written a part of a file.
    """

    def __init__(self, held: HeldModel, division: Division, guard: Guard, random: Generators) -> None:
        self._held, self._division, self._guard, self._random = held, division, guard, random
        self._saving: Saving | None = None
        self._staging: Staging | None = None  # its memory is used again

    def save(
        self, folder: str | os.PathLike[str], optimizer: Optimizers, moved: Moved, *, step: int, scheduler: Any,
        data: Any, extra: Any, keep: int | None, wait: bool,
    ) -> Saving:  # fmt: skip
        """See ``Job.save``."""
        from meshwright.checkpoint import jobs, staging

        self._begin()
        if not wait and self._staging is None:
            self._staging = staging.Staging()
        self._saving = jobs.save(
            self._owner, self._talk(moved), folder, optimizer,
            step=step, scheduler=scheduler, data=data, extra=extra, keep=keep, staging=None if wait else self._staging,
        )  # fmt: skip
        return self._saving

    def saved(self) -> None:
        """See ``Job.saved``."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(
        self, path: str | os.PathLike[str], optimizer: Optimizers, moved: Moved, *, scheduler: Any, data: Any,
        verify: bool, or_before: bool,
    ) -> Loaded:  # fmt: skip
        """See ``Job.load``."""
        from meshwright.checkpoint import jobs

        self._begin()
        loaded = jobs.load(
            self._owner, self._talk(moved), path, optimizer,
            scheduler=scheduler, data=data, verify=verify, or_before=or_before,
        )  # fmt: skip
        self._division.settle(loaded.rows)
        self._guard.begin()
        return loaded

    def load_pretrained(self, folder: str | os.PathLike[str], moved: Moved, *, strict: bool) -> Pretrained:
        """See ``Job.load_pretrained``."""
        from meshwright.checkpoint.pretrained import load_pretrained

        self._begin()
        loaded = load_pretrained(self._held, folder, strict=strict, moved=moved)
        self._guard.begin()
        return loaded

    def _begin(self) -> None:
        """The last step and the last save, whose ranks agree over the same group, are done; parameters are at rest."""
        self._division.finish_step()
        self.saved()
        self._held.reshard()

    def _owner(self) -> Owner:
        from meshwright.checkpoint.jobs import Owner

        return Owner.of_job(self._held, self._random, self._division.rows)

    def _talk(self, moved: Moved) -> RankAgreement:
        from meshwright.checkpoint.talk import RankAgreement

        return RankAgreement(self._held.groups.files, moved=moved)
