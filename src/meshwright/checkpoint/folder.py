"""A folder of checkpoints. Nothing here knows tensors or ranks.

    runs/
      step-00000100/         complete: it is published by one rename, last of all
        manifest.json        every other file: its size, its checksum, and that of each piece in it
        .metadata            DCP's: which piece of which tensor stands where
        __0_0.distcp …       the pieces that rank 0 wrote
        run.pt               settings of optimizers, scheduler, position in the data (``weights_only``)
        plan.yaml, recipe.json, config.json
      latest                 the name of the newest, for people: nothing here reads it
      .lock                  who saves here (see ``lock``)
      .saving-…              one that is being written, or whose writing was broken off; its name has its owner

**The newest is the one that was saved last**, and the names alone say which that is. A run that goes back saves a smaller
step than the newest; from then on names have a count of these returns:

    saved     100             50                    60                    70                    70 again
    name      step-00000100   step-00000050.back1   step-00000060.back1   step-00000070.back1   step-00000070.back1.1

So a name is given by one rename together with the checkpoint; no clock and no other file takes part. A checkpoint of a
step that is there already gets a name of its own before the first goes: at no instant is there none.
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
_BLOCK = 1 << 20  # bytes read at a time
_SHOWN = 3  # tensors of a damaged file that are named

Moved: TypeAlias = Callable[[], None]
"""Is called whenever some of a checkpoint was read or written: what a watch counts (see ``watch/watchdog``)."""


def nobody() -> None:
    """Where nobody counts."""


@dataclass(frozen=True)
class Piece:
    """A part of a file, as it was written; mostly of a tensor.

    Attributes:
        name: the tensor's, in the checkpoint; empty for what is none.
        offset, length: bytes in the file.
        crc32: of these bytes.
    """

    name: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its size in bytes, and the pieces it consists of, without gaps."""

    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps that were done.
        about: versions, time, mesh: facts for a person and for the loader, as JSON has them.
        files: every other file, by name.
    """

    step: int
    about: Mapping[str, Any]
    files: Mapping[str, File]

    def dump(self) -> str:
        """As text that says itself whether it is whole."""
        files = {
            name: [f.size, [[p.name, p.offset, p.length, p.crc32] for p in f.pieces]] for name, f in self.files.items()
        }
        body = json.dumps({"format": FORMAT, "step": self.step, "about": dict(self.about), "files": files}, indent=1)
        return f'{{"crc32": {zlib.crc32(body.encode())}, "manifest":\n{body}}}\n'

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Raises ValueError where the text is not what was written, to the byte."""
        body = json.loads(text)["manifest"]
        files = {name: File(size, tuple(Piece(*p) for p in pieces)) for name, (size, pieces) in body["files"].items()}
        manifest = cls(body["step"], body["about"], files)
        if body["format"] != FORMAT or manifest.dump() != text:
            raise ValueError("its checksum is another")
        return manifest


@dataclass(frozen=True, order=True)
class Place:
    """Where a checkpoint stands in the order of saving; the one that was saved last is the largest.

    Attributes:
        returns: how often saving had gone back to an earlier step.
        step: optimizer steps that were done.
        again: how often this step had been saved before, without another in between.
    """

    returns: int
    step: int
    again: int = 0

    @classmethod
    def of(cls, name: str) -> Place | None:
        """The place of a checkpoint of this name; None for a name that no checkpoint has."""
        match = _NAME.fullmatch(name)
        return match and cls(int(match[2] or 0), int(match[1]), int(match[3] or 0))

    @property
    def name(self) -> str:
        """The name of its directory."""
        returned = f".back{self.returns}" if self.returns else ""
        return f"step-{self.step:08d}{returned}" + (f".{self.again}" if self.again else "")

    def next(self, step: int) -> Place:
        """The place of a checkpoint of ``step`` that is saved after this one."""
        if step == self.step:
            return Place(self.returns, step, self.again + 1)
        return Place(self.returns if step > self.step else self.returns + 1, step)


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, in the order in which they were saved. What is being written is not among them."""
    root = Path(folder)
    if not root.is_dir():
        return []
    places = [(place, p) for p in root.iterdir() if (place := Place.of(p.name)) is not None and p.is_dir()]
    return [path for _, path in sorted(places)]


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint that was saved last in a folder, or None."""
    return next(reversed(complete(folder)), None)


def before(path: Path) -> list[Path]:
    """The checkpoints from which a run may have come to this one, the newest first: saved earlier, of a smaller step."""
    here = Place.of(path.name)
    if here is None:
        return []
    places = [(Place.of(p.name), p) for p in reversed(complete(path.parent))]
    return [p for place, p in places if place is not None and place < here and place.step < here.step]


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint at a path: it itself, or the newest in it.

    Raises:
        CheckpointError: there is none.
    """
    at = Path(path)
    if (at / MANIFEST).is_file() or Place.of(at.name) is not None:
        if at.is_dir():
            return at
    elif (found := newest(at)) is not None:
        return found
    given = "no such directory" if not at.exists() else "no checkpoint in it"
    if at.is_dir() and any(p.name.startswith(".saving-") for p in at.iterdir()):
        given += ": one was begun and never completed"
    raise CheckpointError([Finding(str(at), given, "a checkpoint, or a folder of them", _offer(at))], "this checkpoint")


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    at = path / MANIFEST
    try:
        return Manifest.parse(at.read_text(encoding="utf-8"))
    except FileNotFoundError:
        given = "missing"
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as damaged:  # UnicodeDecodeError and JSON's are ValueErrors
        given = f"damaged: {damaged}" if str(damaged) else "damaged"
    raise CheckpointError([Finding(str(at), given, "as it was written", _offer(path))], "this checkpoint")


def verify(
    path: Path, manifest: Manifest | None = None, *, part: int = 0, parts: int = 1, moved: Moved = nobody
) -> None:
    """Reads every file of a checkpoint and compares it with what was written.

    Args:
        part, parts: only every ``parts``-th file, from the ``part``-th on, so that ranks share the reading.
        moved: is called for every block that was read.

    Raises:
        CheckpointError: naming each file that is missing, short or changed, and the tensors in it that are lost.
    """
    manifest = manifest or read_manifest(path)
    findings = [damage(path, name, manifest.files[name], moved) for name in sorted(manifest.files)[part::parts]]
    raise_if_damaged(f for f in findings if f is not None)


def raise_if_damaged(findings: Iterable[Finding]) -> None:
    """Raises CheckpointError with what was found, if anything was."""
    if problems := list(findings):
        raise CheckpointError(problems, "this checkpoint")


def damage(path: Path, name: str, file: File, moved: Moved = nobody) -> Finding | None:
    """What is wrong with a file of a checkpoint, or None."""
    at = path / name
    required = f"{file.size:,} bytes, as they were written"
    if not at.is_file():
        return Finding(str(at), f"missing, and with it {_listed(p.name for p in file.pieces)}", required, _offer(path))
    size = at.stat().st_size
    if size != file.size:
        lost = _listed(p.name for p in file.pieces if p.offset + p.length > size)
        return Finding(str(at), f"{size:,} bytes; lost: {lost}", required, _offer(path))
    with at.open("rb") as opened:
        changed = [p.name for p in file.pieces if checksum(opened, p.length, moved) != p.crc32]
    return Finding(str(at), f"changed; damaged: {_listed(changed)}", required, _offer(path)) if changed else None


def checksum(opened: BinaryIO, length: int, moved: Moved = nobody) -> int:
    """CRC-32 of the next ``length`` bytes of an open file. ``moved`` is called for every block."""
    crc = 0
    while length > 0 and (block := opened.read(min(length, _BLOCK))):
        crc, length = zlib.crc32(block, crc), length - len(block)
        moved()
    return crc


def described(path: Path, pieces: Iterable[tuple[str, int, int]] = (), moved: Moved = nobody) -> File:
    """A file that has just been written, as the manifest has it. ``pieces``: name, offset and length of each tensor's."""
    parts: list[Piece] = []
    with path.open("rb") as opened:
        size, end = os.fstat(opened.fileno()).st_size, 0
        for name, offset, length in [*sorted(pieces, key=lambda p: p[1]), ("", size, 0)]:
            if offset > end:
                parts.append(Piece("", end, offset - end, checksum(opened, offset - end, moved)))
            if length:
                parts.append(Piece(name, offset, length, checksum(opened, length, moved)))
            end = offset + length
    return File(size, tuple(parts))


def _listed(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(filter(None, names)))
    if not distinct:
        return "no tensor"
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(distinct[:_SHOWN]) + more


def _offer(path: Path) -> str:
    """Another checkpoint that can be had instead."""
    others = before(path) or [p for p in reversed(complete(path.parent)) if p.name != path.name]
    return f"load {others[0]} instead" if others else ""


# --- writing ------------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int, owner: str = "") -> Path:
    """A fresh directory to write a checkpoint in, aside; what earlier writing left behind is removed.

    Args:
        owner: names the process that writes. What another thread of it is writing is left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(".saving-*"), *folder.glob(".old-*")]:
        if not (owner and f".{owner}." in old.name):
            _discard(old)
    aside = folder / ".".join(filter(None, (f".saving-{Place(0, step).name}", owner, uuid4().hex[:8])))
    aside.mkdir()
    return aside


def publish(aside: Path, manifest: Manifest, keep: int | None = None) -> Path:
    """Makes a checkpoint out of a directory that holds all of it: from one instant to the next it is there.

    Args:
        keep: how many to keep, those that were saved last; older ones are removed. None keeps all.

    Warns of what could not be done after the checkpoint was there: an older one that could not be removed.
    """
    write_file(aside / MANIFEST, manifest.dump().encode())
    _sync(aside)
    folder = aside.parent
    target = _next(folder, manifest.step)
    os.rename(aside, target)
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
    """What a new checkpoint takes the place of: others of its step, and all but the ``keep`` that were saved last."""
    every = complete(target.parent)
    replaced = [p for p in every if _step(p) == _step(target) and p != target]
    others = [p for p in every if p not in replaced]
    return replaced + (others[:-keep] if keep else [])


def _next(folder: Path, step: int) -> Path:
    """Where a checkpoint goes that is saved now: the last in the order of saving, at a name that nothing has."""
    last = newest(folder)
    place = Place(0, step) if last is None else _place(last).next(step)
    while os.path.lexists(folder / place.name):  # a file, or a link that leads nowhere
        place = place.next(step)
    return folder / place.name


def _place(path: Path) -> Place:
    place = Place.of(path.name)
    assert place is not None
    return place


def _step(path: Path) -> int:
    return _place(path).step


def remove(path: Path) -> None:
    """Removes a checkpoint; from the first instant on it is none any more, not half of one."""
    aside = path.with_name(f".old-{path.name}.{uuid4().hex[:8]}")
    os.rename(path, aside)
    _discard(aside)


def _discard(path: Path) -> None:
    """Removes a directory as far as that can be done; of a link to one only the link, for its content is elsewhere."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """A file that is on the disk when this returns."""
    with path.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(directory: Path) -> None:
    """The names in a directory, on the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
