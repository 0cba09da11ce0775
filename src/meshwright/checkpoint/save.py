"""Saving: every rank writes its own pieces aside; rank 0 publishes when all are there.

    stage ─ write (DCP) ─ describe ─► rank 0: manifest, rename ─► all ranks: where it is

Asynchronously, the pieces are copied first, and the rest runs in a thread, over a process group of its own.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint.contents import OptimizerContents, on_cpu
from meshwright.checkpoint.folder import Manifest, begin, described, publish, write_file
from meshwright.checkpoint.pieces import Piece, PieceSaver
from meshwright.checkpoint.storage import METADATA, Writer
from meshwright.errors import CheckpointError, Finding, Findings

RUN = "run.pt"


class Saving:
    """A checkpoint that is being written, or has been."""

    def __init__(self, write: Callable[[], Path], *, wait: bool) -> None:
        self._result: Future[Path] = Future()
        self._write = write
        if wait:
            self._run()
            self.wait()
        else:
            Thread(target=self._run, name="meshwright: saving").start()

    def _run(self) -> None:
        try:
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
class Talk:
    """How the processes of a save or load agree; alone in a plain process."""

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around DCP: it warns a plain process that it is one."""
        with warnings.catch_warnings():
            if self.group is None:
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.group is None:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, findings: Findings) -> None:
        """Raises on every rank what any rank has found."""
        every = [f for found in self.all(list(findings)) for f in found]
        if every:
            raise CheckpointError(dict.fromkeys(every), findings.subject)

    def first(self, work: Callable[[], Any], failed: Finding) -> Any:
        """What rank 0 makes of some work on files; raises CheckpointError on every rank where it fails."""
        value: Any = None
        if self.rank == 0:
            try:
                value = work()
            except OSError as error:
                value = _because(failed, error)
        value = self.all(value)[0]
        if isinstance(value, Finding):
            raise CheckpointError([value], "this checkpoint")
        return value


@dataclass(frozen=True)
class Snapshot:
    """What one rank has to save.

    Attributes:
        pieces: tensors.
        optimizers: what they have besides.
        run: of rank 0: what else is restored (scheduler, data, extra), by name.
        files: of rank 0: texts that are put beside, by file name.
        about: of rank 0: facts for the manifest.
    """

    pieces: Sequence[Piece]
    optimizers: Sequence[OptimizerContents]
    run: Mapping[str, Any]
    files: Mapping[str, str]
    about: Mapping[str, Any]

    def staged(self) -> Snapshot:
        """With tensors that training does not write to."""
        return Snapshot(on_cpu(self.pieces), self.optimizers, self.run, self.files, self.about)


def write(snapshot: Snapshot, folder: Path, step: int, keep: int | None, talk: Talk) -> Path:
    """Writes and publishes. Collective.

    Raises:
        CheckpointError: on every rank, where any could not write; nothing of it is left.
    """
    failed = Finding(str(folder), "it could not be written", "a folder that every rank can write to, with space")
    aside: Path = talk.first(lambda: begin(folder, step), failed)
    try:
        files = _pieces(snapshot, aside, talk, failed)
        run = _run(snapshot, talk)
        return Path(talk.first(lambda: _publish(snapshot, aside, step, keep, files, run), failed))
    except BaseException:
        if talk.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _pieces(snapshot: Snapshot, aside: Path, talk: Talk, failed: Finding) -> dict[str, Any]:
    """Writes this rank's pieces; the files of all ranks, described."""
    writer = Writer(aside)
    try:
        with talk.alone():
            dcp.save(
                {}, storage_writer=writer, planner=PieceSaver(snapshot.pieces),
                process_group=talk.group, no_dist=talk.group is None,
            )  # fmt: skip
    except CheckpointException as error:
        causes = "; ".join(dict.fromkeys(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items()))
        raise CheckpointError([_because(failed, causes)], "this checkpoint") from None
    return {name: file for files in talk.all(writer.files) for name, file in files.items()}


def _run(snapshot: Snapshot, talk: Talk) -> dict[str, Any]:
    """What is no tensor of the model's: each optimizer's groups with the names of all ranks, scheduler, data, extra."""
    ours = [(o.groups, o.scalars) for o in snapshot.optimizers]
    optimizers = []
    for of_ranks in zip(*talk.all(ours), strict=True):
        groups = [
            {**of_group[0], "names": list(dict.fromkeys(n for g in of_group for n in g["names"]))}
            for of_group in zip(*(groups for groups, _ in of_ranks), strict=True)
        ]
        scalars = {name: values for _, found in of_ranks for name, values in found.items()}
        optimizers.append({"groups": groups, "scalars": scalars})
    return {**snapshot.run, "optimizers": optimizers}


def _publish(
    snapshot: Snapshot, aside: Path, step: int, keep: int | None, files: dict[str, Any], run: dict[str, Any]
) -> Path:
    write_file(aside / RUN, dumped(run))
    for name, text in snapshot.files.items():
        write_file(aside / name, text.encode())
    for name in (METADATA, RUN, *snapshot.files):
        files[name] = described(aside / name)
    return publish(aside, Manifest(step, snapshot.about, files), keep)


def dumped(run: Mapping[str, Any]) -> bytes:
    """As bytes that ``torch.load`` takes with ``weights_only``."""
    opened = io.BytesIO()
    torch.save(dict(run), opened)
    return opened.getvalue()


def check_loadable(run: Mapping[str, Any], findings: Findings) -> None:
    """Adds to ``findings`` what a load would refuse, by its name: it would need code of the checkpoint's to be run."""
    for name, value in run.items():
        try:
            torch.load(io.BytesIO(dumped({name: value})), weights_only=True)
        except Exception as refused:
            why = str(refused).strip().splitlines()[-1][:200]
            findings.add(
                where=name,
                given=f"{type(value).__name__} that torch.load(weights_only=True) refuses: {why}",
                required="tensors, numbers, text, and lists, tuples and dicts of them",
            )


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


def _because(failed: Finding, error: object) -> Finding:
    return Finding(failed.where, f"{failed.given}: {error}", failed.required, failed.fix)
