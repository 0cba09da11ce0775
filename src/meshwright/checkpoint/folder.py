"""A folder of checkpoints. Nothing here knows tensors or ranks.

    runs/
      step-00000100/         complete: it is published by one rename, last of all
        manifest.json        every other file: its size, its checksum, and that of each piece in it
        .metadata            DCP's: which piece of which tensor stands where
        __0_0.distcp …       the pieces that rank 0 wrote
        run.pt               settings of optimizers, scheduler, position in the data (``weights_only``)
        plan.yaml, recipe.json, config.json
      latest                 the name of the newest
      .saving-…              one that is being written, or whose writing was broken off

A checkpoint of a step that is there already gets a name of its own (``step-00000100.1``): at no instant is there none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.errors import CheckpointError, Finding

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_BLOCK = 1 << 20  # bytes read at a time
_SHOWN = 3  # tensors of a damaged file that are named


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
        found = cls(body["step"], body["about"], files)
        if body["format"] != FORMAT or found.dump() != text:
            raise ValueError("its checksum is another")
        return found


def name_of(step: int, again: int = 0) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step:08d}" + (f".{again}" if again else "")


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, oldest first. What is being written is not among them."""
    root = Path(folder)
    if not root.is_dir():
        return []
    found = [(_order(p.name), p) for p in root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return [path for _, path in sorted(found)]


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    return next(reversed(complete(folder)), None)


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint at a path: it itself, or the newest in it.

    Raises:
        CheckpointError: there is none.
    """
    at = Path(path)
    if (at / MANIFEST).is_file() or _NAME.fullmatch(at.name):
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


def verify(path: Path, manifest: Manifest | None = None, *, part: int = 0, parts: int = 1) -> None:
    """Reads every file of a checkpoint and compares it with what was written.

    Args:
        part, parts: only every ``parts``-th file, from the ``part``-th on, so that ranks share the reading.

    Raises:
        CheckpointError: naming each file that is missing, short or changed, and the tensors in it that are lost.
    """
    manifest = manifest or read_manifest(path)
    findings = [damage(path, name, manifest.files[name]) for name in sorted(manifest.files)[part::parts]]
    raise_if_damaged(f for f in findings if f is not None)


def raise_if_damaged(findings: Iterable[Finding]) -> None:
    """Raises CheckpointError with what was found, if anything was."""
    if found := list(findings):
        raise CheckpointError(found, "this checkpoint")


def damage(path: Path, name: str, file: File) -> Finding | None:
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
        changed = [p.name for p in file.pieces if checksum(opened, p.length) != p.crc32]
    return Finding(str(at), f"changed; damaged: {_listed(changed)}", required, _offer(path)) if changed else None


def checksum(opened: BinaryIO, length: int) -> int:
    """CRC-32 of the next ``length`` bytes of an open file."""
    crc = 0
    while length > 0 and (block := opened.read(min(length, _BLOCK))):
        crc, length = zlib.crc32(block, crc), length - len(block)
    return crc


def described(path: Path, pieces: Iterable[tuple[str, int, int]] = ()) -> File:
    """A file that has just been written, as the manifest has it. ``pieces``: name, offset and length of each tensor's."""
    found: list[Piece] = []
    with path.open("rb") as opened:
        size, end = os.fstat(opened.fileno()).st_size, 0
        for name, offset, length in [*sorted(pieces, key=lambda p: p[1]), ("", size, 0)]:
            if offset > end:
                found.append(Piece("", end, offset - end, checksum(opened, offset - end)))
            if length:
                found.append(Piece(name, offset, length, checksum(opened, length)))
            end = offset + length
    return File(size, tuple(found))


def _listed(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(filter(None, names)))
    if not distinct:
        return "no tensor"
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(distinct[:_SHOWN]) + more


def _offer(path: Path) -> str:
    """Another checkpoint that can be had instead: the newest before this one."""
    others = [p for p in complete(path.parent) if p.name != path.name]
    if _NAME.fullmatch(path.name):
        others = [p for p in others if _order(p.name) < _order(path.name)] or others
    return f"load {others[-1]} instead" if others else ""


# --- writing ------------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """A fresh directory to write a checkpoint in, aside; what earlier writing left behind is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob(".saving-*"), *folder.glob(".old-*")]:
        shutil.rmtree(old, ignore_errors=True)
    aside = folder / f".saving-{name_of(step)}"
    aside.mkdir()
    return aside


def publish(aside: Path, manifest: Manifest, keep: int | None = None) -> Path:
    """Makes a checkpoint out of a directory that holds all of it: from one instant to the next it is there.

    Args:
        keep: how many to keep, the newest; older ones are removed. None keeps all.
    """
    write_file(aside / MANIFEST, manifest.dump().encode())
    _sync(aside)
    folder, again = aside.parent, 0
    while (target := folder / name_of(manifest.step, again)).exists():
        again += 1
    os.rename(aside, target)
    _sync(folder)
    write_file(folder / f".{LATEST}", f"{target.name}\n".encode())
    os.replace(folder / f".{LATEST}", folder / LATEST)
    for step in [p for p in complete(folder) if _order(p.name)[0] == manifest.step and p != target]:
        remove(step)
    if keep is not None:
        for old in [p for p in complete(folder)[:-keep] if p != target]:
            remove(old)
    return target


def remove(path: Path) -> None:
    """Removes a checkpoint; from the first instant on it is none any more, not half of one."""
    aside = path.with_name(f".old-{path.name}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


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
