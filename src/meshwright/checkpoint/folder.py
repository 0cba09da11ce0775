"""A folder of checkpoints. This file knows neither tensors nor ranks.

    runs/
      step-00000100/         a complete checkpoint: published by one rename, as the last action of a save
        manifest.json        the size of every other file, and the checksum of each piece in it
        .metadata            of DCP: the file and offset of each chunk of each tensor
        __0_0.distcp …       the pieces that rank 0 wrote
        run.pt               settings of optimizers, scheduler, position in the data (``weights_only``)
        plan.yaml, recipe.json, config.json
      latest                 the name of the newest checkpoint, for people; no code reads it
      .lock                  the process that saves here (see ``lock``)
      .saving-…              a checkpoint that is being written, or was never completed; its name contains its writer

**The newest checkpoint is the one that was saved last.** The names alone determine which one that is. A run that resumes from
an older checkpoint saves smaller steps than the newest has; from then on, names count these returns:

    saved     100             50                    60                    70                    70 again
    name      step-00000100   step-00000050.back1   step-00000060.back1   step-00000070.back1   step-00000070.back1.1

So one rename gives a checkpoint its name and its place in the order; neither clocks nor other files take part. If a step is
saved again, the new checkpoint gets its name before the old one is removed, so that there always is one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from uuid import uuid4

from meshwright.errors import CheckpointError, Finding

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.back(\d+))?(?:\.(\d+))?")
_BLOCK = 1 << 20  # bytes read at a time: large enough to read at full speed, and a watchdog sees progress after each
_SHOWN = 3  # most tensors of a damaged file that an error names

OnProgress: TypeAlias = Callable[[], None]
"""Called whenever a part of a checkpoint has been read or written. A watchdog counts the calls (see ``watch/watchdog``)."""


def ignore_progress() -> None:
    """The ``OnProgress`` that does nothing."""


@dataclass(frozen=True)
class FileRange:
    """A range of bytes in a file, with its checksum.

    Attributes:
        name: of the tensor in the checkpoint; empty for bytes that belong to no tensor.
        offset, length: in bytes.
        crc32: checksum of these bytes, as they were written.
    """

    name: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its size in bytes, and the pieces it consists of, without gaps."""

    size: int
    pieces: tuple[FileRange, ...]


@dataclass(frozen=True)
class Manifest:
    """The list of a checkpoint's files, with their sizes and checksums.

    Attributes:
        step: number of optimizer steps before the save.
        about: versions, time, mesh and other facts, as plain JSON values.
        files: name → file, for every file but the manifest.
    """

    step: int
    about: Mapping[str, Any]
    files: Mapping[str, File]

    def dump(self) -> str:
        """The manifest as JSON, with its checksum."""
        files = {
            name: [f.size, [[p.name, p.offset, p.length, p.crc32] for p in f.pieces]] for name, f in self.files.items()
        }
        body = json.dumps({"format": FORMAT, "step": self.step, "about": dict(self.about), "files": files}, indent=1)
        return f'{{"crc32": {zlib.crc32(body.encode())}, "manifest":\n{body}}}\n'

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Reads the text of ``dump``. Raises ValueError if a single byte has changed."""
        body = json.loads(text)["manifest"]
        files = {
            name: File(size, tuple(FileRange(*p) for p in pieces)) for name, (size, pieces) in body["files"].items()
        }
        manifest = cls(body["step"], body["about"], files)
        if body["format"] != FORMAT or manifest.dump() != text:
            raise ValueError("its checksum is another")
        return manifest


@dataclass(frozen=True, order=True)
class SaveOrder:
    """The position of a checkpoint in the order of saving, which its name contains. Later checkpoints compare greater.

    >>> first = SaveOrder.parse("step-00000100")
    >>> first.next(50).name, first.next(100).name
    ('step-00000050.back1', 'step-00000100.1')

    Attributes:
        returns: how often a run had gone back to an earlier step before this save.
        step: number of optimizer steps before the save.
        again: how often this step had been saved before, without another step in between.
    """

    returns: int
    step: int
    again: int = 0

    @classmethod
    def parse(cls, name: str) -> SaveOrder | None:
        """The position that the name of a checkpoint's directory contains. None for other names."""
        match = _NAME.fullmatch(name)
        return match and cls(int(match[2] or 0), int(match[1]), int(match[3] or 0))

    @property
    def name(self) -> str:
        """The name of the checkpoint's directory."""
        returned = f".back{self.returns}" if self.returns else ""
        return f"step-{self.step:08d}{returned}" + (f".{self.again}" if self.again else "")

    def next(self, step: int) -> SaveOrder:
        """The position of a checkpoint of ``step`` that is saved directly after this one."""
        if step == self.step:
            return SaveOrder(self.returns, step, self.again + 1)
        return SaveOrder(self.returns if step > self.step else self.returns + 1, step)


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints of a folder, in the order in which they were saved."""
    root = Path(folder)
    if not root.is_dir():
        return []
    ordered = [
        (order, path) for path in root.iterdir() if (order := SaveOrder.parse(path.name)) is not None and path.is_dir()
    ]
    return [path for _, path in sorted(ordered)]


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of a folder that was saved last, or None."""
    return next(reversed(complete(folder)), None)


def before(path: Path) -> list[Path]:
    """The checkpoints that were saved before this one and have a smaller step, the newest first.

    A run may have reached this checkpoint from any of them.
    """
    reference = SaveOrder.parse(path.name)
    if reference is None:
        return []
    earlier = []
    for other in reversed(complete(path.parent)):
        order = SaveOrder.parse(other.name)
        if order is not None and order < reference and order.step < reference.step:
            earlier.append(other)
    return earlier


def find(path: str | os.PathLike[str]) -> Path:
    """The path itself if it is a checkpoint, else the newest checkpoint of the folder.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file() or SaveOrder.parse(folder.name) is not None:
        if folder.is_dir():
            return folder
    elif (last := newest(folder)) is not None:
        return last
    given = "no such directory" if not folder.exists() else "no checkpoint in it"
    if folder.is_dir() and any(p.name.startswith(".saving-") for p in folder.iterdir()):
        given += ": one was begun and never completed"
    required = "a checkpoint, or a folder of them"
    raise CheckpointError([Finding(str(folder), given, required, _alternative(folder))], "this checkpoint")


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    file = path / MANIFEST
    try:
        return Manifest.parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        given = "missing"
    # Texts that cannot be decoded or are no JSON raise subclasses of ValueError.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        given = f"damaged: {error}" if str(error) else "damaged"
    raise CheckpointError([Finding(str(file), given, "as it was written", _alternative(path))], "this checkpoint")


def verify(
    path: Path, manifest: Manifest | None = None, *, part: int = 0, parts: int = 1,
    on_progress: OnProgress = ignore_progress,
) -> None:  # fmt: skip
    """Reads the files of a checkpoint, and compares them with the manifest's sizes and checksums.

    Args:
        part, parts: read only every ``parts``-th file, beginning with file ``part``, so that ranks share the work.
        on_progress: called for each block that was read.

    Raises:
        CheckpointError: with each file that is missing, short or changed, and its tensors that are lost.
    """
    manifest = manifest or read_manifest(path)
    names = sorted(manifest.files)[part::parts]
    findings = [damage(path, name, manifest.files[name], on_progress) for name in names]
    raise_if_damaged(finding for finding in findings if finding is not None)


def raise_if_damaged(findings: Iterable[Finding]) -> None:
    """Raises CheckpointError with the findings, if there are any."""
    if problems := list(findings):
        raise CheckpointError(problems, "this checkpoint")


def damage(path: Path, name: str, file: File, on_progress: OnProgress = ignore_progress) -> Finding | None:
    """Compares a file of a checkpoint with the manifest. Returns a finding if it is missing, short or changed."""
    on_disk = path / name
    required = f"{file.size:,} bytes, as they were written"
    if not on_disk.is_file():
        given = f"missing, and with it {_listed(piece.name for piece in file.pieces)}"
        return Finding(str(on_disk), given, required, _alternative(path))
    size = on_disk.stat().st_size
    if size != file.size:
        lost = _listed(piece.name for piece in file.pieces if piece.offset + piece.length > size)
        return Finding(str(on_disk), f"{size:,} bytes; lost: {lost}", required, _alternative(path))
    with on_disk.open("rb") as opened:
        changed = [p.name for p in file.pieces if checksum(opened, p.length, on_progress) != p.crc32]
    if not changed:
        return None
    return Finding(str(on_disk), f"changed; damaged: {_listed(changed)}", required, _alternative(path))


def checksum(opened: BinaryIO, length: int, on_progress: OnProgress = ignore_progress) -> int:
    """CRC-32 of the next ``length`` bytes of an open file."""
    crc = 0
    while length > 0 and (block := opened.read(min(length, _BLOCK))):
        crc, length = zlib.crc32(block, crc), length - len(block)
        on_progress()
    return crc


def described(
    path: Path, chunks: Iterable[tuple[str, int, int]] = (), on_progress: OnProgress = ignore_progress
) -> File:
    """The manifest's description of a file that has just been written. Reads the file for the checksums.

    Args:
        chunks: (name of the tensor, offset, length) of each tensor's bytes in the file. The gaps between them become pieces
            without a name.
    """
    pieces: list[FileRange] = []
    with path.open("rb") as opened:
        size, end = os.fstat(opened.fileno()).st_size, 0
        for name, offset, length in [*sorted(chunks, key=lambda chunk: chunk[1]), ("", size, 0)]:
            if offset > end:
                pieces.append(FileRange("", end, offset - end, checksum(opened, offset - end, on_progress)))
            if length:
                pieces.append(FileRange(name, offset, length, checksum(opened, length, on_progress)))
            end = offset + length
    return File(size, tuple(pieces))


def _listed(names: Iterable[str]) -> str:
    """The first distinct names, and the number of the others."""
    distinct = list(dict.fromkeys(filter(None, names)))
    if not distinct:
        return "no tensor"
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(distinct[:_SHOWN]) + more


def _alternative(path: Path) -> str:
    """The fix of an error: another checkpoint to load; empty if there is none."""
    others = before(path) or [p for p in reversed(complete(path.parent)) if p.name != path.name]
    return f"load {others[0]} instead" if others else ""


# --- writing ------------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int, owner: str = "") -> Path:
    """Creates a temporary directory to write a checkpoint in. Removes the temporary directories of unfinished saves.

    Args:
        owner: name of the process that writes. Directories with this name stay: another thread may be writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(".saving-*"), *folder.glob(".old-*")]:
        if not (owner and f".{owner}." in old.name):
            _discard(old)
    parts = (f".saving-{SaveOrder(0, step).name}", owner, uuid4().hex[:8])
    temporary = folder / ".".join(filter(None, parts))
    temporary.mkdir()
    return temporary


def publish(temporary: Path, manifest: Manifest, keep: int | None = None) -> Path:
    """Publishes a temporary directory as a checkpoint by one rename, so that no incomplete checkpoint is ever visible.

    Args:
        keep: number of the newest checkpoints to keep; older ones are removed. None: keep all.

    Returns:
        The checkpoint's path.

    Warns if an older checkpoint could not be removed; the new one is published in any case.
    """
    write_file(temporary / MANIFEST, manifest.dump().encode())
    _sync(temporary)
    folder = temporary.parent
    target = _next_path(folder, manifest.step)
    os.rename(temporary, target)
    _sync(folder)
    try:
        write_file(folder / f".{LATEST}", f"{target.name}\n".encode())
        os.replace(folder / f".{LATEST}", folder / LATEST)
        for old in _outdated(target, keep):
            remove(old)
    except OSError as error:
        warnings.warn(f"{target} is saved; but: {error}", stacklevel=2)
    return target


def _outdated(target: Path, keep: int | None) -> list[Path]:
    """The checkpoints to remove after ``target`` is published: others of its step, and those beyond the ``keep`` newest."""
    all_paths = complete(target.parent)
    same_step = [path for path in all_paths if _step(path) == _step(target) and path != target]
    others = [path for path in all_paths if path not in same_step]
    return same_step + (others[:-keep] if keep else [])


def _next_path(folder: Path, step: int) -> Path:
    """The path for a checkpoint that is saved now: last in the order of saving, with a name that is free."""
    last = newest(folder)
    order = SaveOrder(0, step) if last is None else _order(last).next(step)
    while os.path.lexists(folder / order.name):  # a file or a broken link of this name, which complete() does not list
        order = order.next(step)
    return folder / order.name


def _order(path: Path) -> SaveOrder:
    order = SaveOrder.parse(path.name)
    assert order is not None
    return order


def _step(path: Path) -> int:
    return _order(path).step


def remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that no part of it looks like a checkpoint at any time."""
    renamed = path.with_name(f".old-{path.name}.{uuid4().hex[:8]}")
    os.rename(path, renamed)
    _discard(renamed)


def _discard(path: Path) -> None:
    """Removes a directory, ignoring errors. Of a symbolic link, removes the link and not the directory that it points to."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, and returns when its content is on the disk."""
    with path.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(directory: Path) -> None:
    """Returns when the names in a directory are on the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
