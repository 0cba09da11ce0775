"""Saving: every rank writes its own pieces to a temporary directory; rank 0 publishes it when all ranks are done.

    stage ─ write (DCP) ─ checksums ─► rank 0: manifest, rename ─► all ranks: path

An asynchronous save copies the pieces first. The rest runs in a thread, with a process group for checkpoints alone. All
other values are copied at the call in any case, by ``torch.save`` and ``torch.load``, which shows that they can be loaded.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint.contents import OptimizerContents
from meshwright.checkpoint.folder import Manifest, begin, described, publish, write_file
from meshwright.checkpoint.lock import Lock, hold
from meshwright.checkpoint.param_groups import merged_groups, merged_schedule
from meshwright.checkpoint.pieces import LocalPiece, PieceSaver
from meshwright.checkpoint.rank_agreement import RankAgreement, because, cause, without_warning
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.storage import METADATA, Writer
from meshwright.errors import CheckpointError, Finding, Findings

RUN = "run.pt"
_WIDTH = 200  # most characters of an exception's text in an error


class Saving:
    """A checkpoint that is being written, or has been written."""

    def __init__(self, write: Callable[[], Path], *, wait: bool) -> None:
        self._result: Future[Path] = Future()
        self._write = write
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        if wait:
            self._run()
            self.wait()
            return
        try:
            Thread(target=self._run, name="meshwright: saving").start()
        except RuntimeError:  # no thread can be started; write now, since the other ranks wait for this rank's pieces
            self._run()

    def _run(self) -> None:
        try:
            if self._device is not None:  # the current device is a setting of each thread
                torch.accelerator.set_device_index(self._device)
            self._result.set_result(self._write())
        except BaseException as failed:
            self._result.set_exception(failed)

    def done(self) -> bool:
        """Whether the save has finished or failed."""
        return self._result.done()

    def wait(self) -> Path:
        """Waits until the checkpoint is written, and returns its path.

        Raises:
            CheckpointError: it could not be written. No part of it remains.
        """
        return self._result.result()


@dataclass(frozen=True)
class Snapshot:
    """Everything that one rank saves. Rank 0's ``run``, ``files`` and ``about`` are written; those of other ranks are not.

    Attributes:
        pieces: tensors.
        optimizers: scalars and settings of the optimizers, copied.
        run: name → other values that a load restores (scheduler, data, extra), copied.
        scheduled: the number of the optimizer whose learning rates the scheduler sets; None if that is not known.
        files: name of an additional file → its text.
        about: facts for the manifest.
    """

    pieces: Sequence[LocalPiece]
    optimizers: Sequence[OptimizerContents]
    run: Mapping[str, Any]
    scheduled: int | None
    files: Mapping[str, str]
    about: Mapping[str, Any]

    def staged(self, staging: Staging) -> Snapshot:
        """The snapshot with copies of its tensors, which training does not write to. Other values are copies already."""
        return replace(self, pieces=staging(self.pieces))


class _OfRank(NamedTuple):
    """What a rank saves that is no tensor, and is merged with that of other ranks.

    Attributes:
        optimizers: (groups, scalars) of each optimizer. A rank's groups name its own parameters only.
    """

    optimizers: list[tuple[Any, Any]]
    scheduler: Any
    scheduled: int | None

    @classmethod
    def of(cls, snapshot: Snapshot) -> _OfRank:
        optimizers = [(o.groups, o.scalars) for o in snapshot.optimizers]
        return cls(optimizers, snapshot.run.get("scheduler"), snapshot.scheduled)


def write(snapshot: Snapshot, folder: Path, step: int, keep: int | None, agreement: RankAgreement) -> Path:
    """Writes and publishes a checkpoint in a folder, and returns its path. Collective.

    Args:
        step: number of optimizer steps that were done.
        keep: number of newest checkpoints to keep. None: all.

    Raises:
        CheckpointError: on every rank, if a rank could not write. No part of the checkpoint remains.
    """
    with ExitStack() as locks:  # rank 0 holds the folder's lock until the checkpoint is published
        return _write(snapshot, folder, step, keep, agreement, lambda: locks.enter_context(hold(folder)))


def _write(
    snapshot: Snapshot,
    folder: Path,
    step: int,
    keep: int | None,
    agreement: RankAgreement,
    take_lock: Callable[[], Lock],
) -> Path:
    """``take_lock``: called on rank 0 alone; returns the folder's lock."""
    failed = Finding(str(folder), "it could not be written", "a folder that every rank can write to, with space")
    locks: list[Lock] = []

    def begin_on_rank_0() -> Path:
        locks.append(take_lock())
        return begin(folder, step, locks[0].holder.name)

    def publish_on_rank_0() -> Path:
        locks[0].check()
        return _publish(snapshot, temporary, step, keep, files, _merged(of_ranks))

    temporary = Path(agreement.first(begin_on_rank_0, failed))
    try:
        files = _write_pieces(snapshot, temporary, agreement, failed)
        of_ranks = agreement.gather(lambda: _OfRank.of(snapshot), failed)
        return Path(agreement.first(publish_on_rank_0, failed))
    except CheckpointError:  # raised on every rank; no rank continues before the directory is removed
        agreement.first(lambda: shutil.rmtree(temporary, ignore_errors=True), failed)
        raise
    # Raised on this rank alone: an interrupt, or a collective that failed since another rank ended.
    except BaseException:
        if agreement.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_pieces(snapshot: Snapshot, directory: Path, agreement: RankAgreement, failed: Finding) -> dict[str, Any]:
    """Writes this rank's pieces. Returns name → size and checksums, for the files of all ranks."""
    writer = Writer(directory, agreement.on_progress)
    try:
        with without_warning() if agreement.group is None else nullcontext():
            dcp.save(
                {}, storage_writer=writer, planner=PieceSaver(snapshot.pieces, agreement.on_progress),
                process_group=agreement.group, no_dist=agreement.group is None,
            )  # fmt: skip
    except CheckpointException as error:
        causes = dict.fromkeys(f"rank {rank}: {cause(failure[0])}" for rank, failure in error.failures.items())
        raise CheckpointError([because(failed, "; ".join(causes))], "this checkpoint") from None
    return {name: file for files in agreement.gather(lambda: writer.files, failed) for name, file in files.items()}


def _publish(
    snapshot: Snapshot, directory: Path, step: int, keep: int | None, files: dict[str, Any], merged: dict[str, Any]
) -> Path:
    """Writes the files that rank 0 alone writes, and the manifest; then publishes the directory.

    Args:
        files: the files of all ranks' pieces.
        merged: name → values of all ranks.
    """
    write_file(directory / RUN, dumped({**snapshot.run, **merged}))
    for name, text in snapshot.files.items():
        write_file(directory / name, text.encode())
    for name in (METADATA, RUN, *snapshot.files):
        files[name] = described(directory / name)
    return publish(directory, Manifest(step, snapshot.about, files), keep)


def _merged(saved_by_rank: Sequence[_OfRank]) -> dict[str, Any]:
    """The groups and scalars of each optimizer, and the scheduler's state, merged over ranks."""
    by_optimizer = [*zip(*(saved.optimizers for saved in saved_by_rank), strict=True)]  # on each rank
    groups = [merged_groups([groups for groups, _ in on_ranks]) for on_ranks in by_optimizer]
    merged: dict[str, Any] = {
        "optimizers": [
            {
                "groups": [group.saved() for group in of_optimizer],
                "scalars": {name: values for _, scalars in on_ranks for name, values in scalars.items()},
            }
            for of_optimizer, on_ranks in zip(groups, by_optimizer, strict=True)
        ]
    }
    scheduled = saved_by_rank[0].scheduled
    if scheduled is not None:
        counts = [len(of_rank) for of_rank, _ in by_optimizer[scheduled]]
        merged["scheduler"] = merged_schedule([saved.scheduler for saved in saved_by_rank], counts, groups[scheduled])
    return merged


def dumped(run: Mapping[str, Any]) -> bytes:
    """The values as bytes of ``torch.save``, for ``loaded``."""
    opened = io.BytesIO()
    torch.save(dict(run), opened)
    return opened.getvalue()


def as_loaded(run: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """The values as a load will return them: copies, on the CPU. Later changes of the values do not change the copies.

    Adds a finding for each value that a load would refuse, since unpickling it would run code.
    """
    copies = {}
    for name, value in run.items():
        try:
            copies[name] = loaded(io.BytesIO(dumped({name: value})))[name]
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1][:_WIDTH]
            findings.add(
                where=name,
                given=f"{type(value).__name__} that torch.load(weights_only=True) refuses: {why}",
                required="tensors, numbers, text, and lists, tuples and dicts of them",
            )
    return copies


def loaded(source: Path | BinaryIO) -> Mapping[str, Any]:
    """The values that ``dumped`` wrote, with all tensors on the CPU. Runs no code of the file."""
    values: Mapping[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    return values


def time_and_versions() -> dict[str, Any]:
    """The time and the versions, for the manifest."""
    from meshwright import __version__

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "meshwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def as_json(value: Any) -> str:
    """A value that contains dataclasses, as JSON."""
    return json.dumps(value, default=lambda x: asdict(x) if hasattr(x, "__dataclass_fields__") else str(x), indent=1)
