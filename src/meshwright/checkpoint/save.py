"""Saving: every rank writes its own pieces aside; rank 0 publishes when all are there.

    stage ─ write (DCP) ─ describe ─► rank 0: manifest, rename ─► all ranks: where it is

Asynchronously, the pieces are copied first, and the rest runs in a thread, over a process group of its own. All that is no
piece is copied at the call in any case: a copy shows that it can be loaded.
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
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint.contents import OptimizerContents
from meshwright.checkpoint.folder import Manifest, begin, described, publish, write_file
from meshwright.checkpoint.lock import Lock, hold
from meshwright.checkpoint.pieces import Piece, PieceSaver
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.storage import METADATA, Writer
from meshwright.checkpoint.talk import RankAgreement, because, cause, without_warning
from meshwright.errors import CheckpointError, Finding, Findings

RUN = "run.pt"


class Saving:
    """A checkpoint that is being written, or has been."""

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
        except RuntimeError:  # no more threads: the other ranks wait for this one's share
            self._run()

    def _run(self) -> None:
        try:
            if self._device is not None:  # which is each thread's own
                torch.accelerator.set_device_index(self._device)
            self._result.set_result(self._write())
        except BaseException as failed:
            self._result.set_exception(failed)

    def done(self) -> bool:
        """Whether it is there, or has failed."""
        return self._result.done()

    def wait(self) -> Path:
        """Where it is, once it is there.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
        """
        return self._result.result()


@dataclass(frozen=True)
class Snapshot:
    """What one rank has to save.

    Attributes:
        pieces: tensors.
        optimizers: what they have besides: copies.
        run: of rank 0: what else is restored (scheduler, data, extra), by name: copies.
        files: of rank 0: texts that are put beside, by file name.
        about: of rank 0: facts for the manifest.
    """

    pieces: Sequence[Piece]
    optimizers: Sequence[OptimizerContents]
    run: Mapping[str, Any]
    files: Mapping[str, str]
    about: Mapping[str, Any]

    def staged(self, staging: Staging) -> Snapshot:
        """With tensors that training does not write to. All else was copied when it was collected."""
        return replace(self, pieces=staging(self.pieces))


def write(snapshot: Snapshot, folder: Path, step: int, keep: int | None, talk: RankAgreement) -> Path:
    """Writes and publishes. Collective.

    Raises:
        CheckpointError: on every rank, if any could not write; nothing of it is left.
    """
    with ExitStack() as held:  # of rank 0: the folder is its own until this ends
        return _write(snapshot, folder, step, keep, talk, lambda: held.enter_context(hold(folder)))


def _write(
    snapshot: Snapshot, folder: Path, step: int, keep: int | None, talk: RankAgreement, take: Callable[[], Lock]
) -> Path:
    """``take``: gives rank 0 the folder's lock."""
    failed = Finding(str(folder), "it could not be written", "a folder that every rank can write to, with space")
    locks: list[Lock] = []

    def begun() -> Path:
        locks.append(take())
        return begin(folder, step, locks[0].holder.name)

    def published() -> Path:
        locks[0].check()
        return _publish(snapshot, aside, step, keep, files, optimizers)

    aside = Path(talk.first(begun, failed))
    try:
        files = _pieces(snapshot, aside, talk, failed)
        optimizers = talk.gather(lambda: [(o.groups, o.scalars) for o in snapshot.optimizers], failed)
        return Path(talk.first(published, failed))
    except CheckpointError:  # on every rank: none goes on before the rest of it is gone
        talk.first(lambda: shutil.rmtree(aside, ignore_errors=True), failed)
        raise
    except BaseException:  # on this rank alone: an interrupt, or the end of another rank
        if talk.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _pieces(snapshot: Snapshot, aside: Path, talk: RankAgreement, failed: Finding) -> dict[str, Any]:
    """Writes this rank's pieces; the files of all ranks, described."""
    writer = Writer(aside, talk.moved)
    try:
        with without_warning() if talk.group is None else nullcontext():
            dcp.save(
                {}, storage_writer=writer, planner=PieceSaver(snapshot.pieces, talk.moved),
                process_group=talk.group, no_dist=talk.group is None,
            )  # fmt: skip
    except CheckpointException as error:
        causes = dict.fromkeys(f"rank {rank}: {cause(of_rank[0])}" for rank, of_rank in error.failures.items())
        raise CheckpointError([because(failed, "; ".join(causes))], "this checkpoint") from None
    return {name: file for files in talk.gather(lambda: writer.files, failed) for name, file in files.items()}


def _publish(
    snapshot: Snapshot, aside: Path, step: int, keep: int | None, files: dict[str, Any], optimizers: list[Any]
) -> Path:
    write_file(aside / RUN, dumped({**snapshot.run, "optimizers": _merged(optimizers)}))
    for name, text in snapshot.files.items():
        write_file(aside / name, text.encode())
    for name in (METADATA, RUN, *snapshot.files):
        files[name] = described(aside / name)
    return publish(aside, Manifest(step, snapshot.about, files), keep)


def _merged(of_ranks: list[Any]) -> list[dict[str, Any]]:
    """What each optimizer has that is no tensor: of each group the names of all ranks."""
    optimizers = []
    for of_optimizer in zip(*of_ranks, strict=True):
        groups = [
            {**of_group[0], "names": list(dict.fromkeys(n for g in of_group for n in g["names"]))}
            for of_group in zip(*(groups for groups, _ in of_optimizer), strict=True)
        ]
        scalars = {name: values for _, scalars_of_rank in of_optimizer for name, values in scalars_of_rank.items()}
        optimizers.append({"groups": groups, "scalars": scalars})
    return optimizers


def dumped(run: Mapping[str, Any]) -> bytes:
    """As bytes that ``torch.load`` takes with ``weights_only``."""
    opened = io.BytesIO()
    torch.save(dict(run), opened)
    return opened.getvalue()


def as_loaded(run: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Copies, on the CPU: what a load will give of each value. What happens to the values later is not in them.

    Adds to ``findings`` what a load would refuse, by its name: it would need code of the checkpoint's to be run.
    """
    copies = {}
    for name, value in run.items():
        try:
            copies[name] = loaded(io.BytesIO(dumped({name: value})))[name]
        except Exception as refused:
            why = (str(refused).strip().splitlines() or [type(refused).__name__])[-1][:200]
            findings.add(
                where=name,
                given=f"{type(value).__name__} that torch.load(weights_only=True) refuses: {why}",
                required="tensors, numbers, text, and lists, tuples and dicts of them",
            )
    return copies


def loaded(source: Path | BinaryIO) -> Mapping[str, Any]:
    """What ``dumped`` wrote, on the CPU wherever it was. Nothing in it is run."""
    values: Mapping[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    return values


def about() -> dict[str, Any]:
    """Versions and time."""
    from meshwright import __version__

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "meshwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def as_json(value: Any) -> str:
    """A value of dataclasses, as text."""
    return json.dumps(value, default=lambda x: asdict(x) if hasattr(x, "__dataclass_fields__") else str(x), indent=1)
