"""A checkpoint, of whatever layout, as a Hugging Face folder: one tensor in memory at a time, in a plain process.

    verified checkpoint ─► model.* by name ─► shards of at most so many bytes ─► written aside ─► renamed

The model's own code is not needed, nor a process group: what a checkpoint says of names, shapes and pieces is enough.
Names are those of the model; a tied parameter is written once, under the first of its names, as transformers does.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from meshwright.checkpoint.load import Stored
from meshwright.checkpoint.talk import RankAgreement
from meshwright.checkpoint.tensorfiles import DTYPES, INDEX, WEIGHTS, Entry, write_file
from meshwright.errors import CheckpointError, Findings
from meshwright.names import by_number

CONFIG, GENERATION = "config.json", "generation_config.json"
KINDS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype.is_floating_point}
_MODEL = "model."
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        checkpoint: of what.
        step: optimizer steps that it has.
        tensors, bytes: of all files of weights.
        files: of weights, by name.
        config: whether there is a config.json, without which ``from_pretrained`` does not know the model.
    """

    folder: Path
    checkpoint: Path
    step: int
    tensors: int
    bytes: int
    files: tuple[str, ...]
    config: bool


def export(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *,
    shard_size: str | int = "5GB", dtype: str | None = None,
) -> Exported:  # fmt: skip
    """Writes a checkpoint's model as safetensors, with ``config.json`` where the checkpoint has one.

    Args:
        checkpoint: one, or a folder of them: the newest.
        out: the folder to make; there may be none, or an empty one.
        shard_size: the most bytes of a file: a number, or with a unit (``500MB``). A larger tensor has its own.
        dtype: of floating-point tensors, as ``bfloat16``; None leaves them as they are.

    Raises:
        PlanError: an argument is wrong. CheckpointError: the checkpoint is damaged. Nothing has been written then.
    """
    folder, findings = Path(out), Findings("this export")
    most = _bytes_of(shard_size, findings)
    _check(folder, dtype, findings)
    findings.raise_if_any()
    stored = Stored.open(checkpoint, RankAgreement(None))
    saved = list(_entries(stored))
    if not saved:
        findings.add(where=str(stored.path), given="no tensors of a model", required="a checkpoint of a model")
        findings.raise_if_any()
    entries = [e if dtype is None or not e.dtype.is_floating_point else replace(e, dtype=KINDS[dtype]) for e in saved]
    shards = _shards(entries, most)
    aside = folder.with_name(f".exporting-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write(stored, shards, aside)
        config = _write_config(stored, entries, aside)
        _publish(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    size = sum(entry.bytes for entry in entries)
    return Exported(folder, stored.path, stored.manifest.step, len(entries), size, tuple(shards), config)


# --- arguments -------------------------------------------------------------------------------------------------------


def _bytes_of(size: str | int, findings: Findings) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    unit = match[2] if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""
    factor = 1 if unit == "B" else _UNITS.get(unit, 0)
    count = int(float(match[1]) * factor) if match else 0
    if count < 1:
        findings.add(where="shard size", given=str(size), required="bytes, as 5GB or 500MB", fix="--shard-size 5GB")
    return count


def _check(folder: Path, dtype: str | None, findings: Findings) -> None:
    if dtype is not None and dtype not in KINDS:
        findings.add(where="dtype", given=dtype, required=f"one of {', '.join(KINDS)}", fix="--dtype bfloat16")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = f"{folder.with_name(folder.name + '-2')}"
        findings.add(where=str(folder), given="is there already", required="a folder that is not there yet", fix=fix)


# --- what there is ---------------------------------------------------------------------------------------------------


def _entries(stored: Stored) -> Iterator[Entry]:
    """The model's tensors, in the order of their names, numbers as numbers."""
    known = stored.metadata.state_dict_metadata
    for name in sorted((n for n in known if n.startswith(_MODEL)), key=by_number):
        if (tensor := stored.tensor(name)) is not None:
            yield Entry(name.removeprefix(_MODEL), tuple(tensor.size), tensor.properties.dtype)


def _shards(entries: Sequence[Entry], most: int) -> dict[str, list[Entry]]:
    """File → its tensors, one after another as long as they fit."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.bytes for e in shards[-1]) + entry.bytes > most:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(stored: Stored, shards: Mapping[str, Sequence[Entry]], aside: Path) -> None:
    pieces = stored.metadata.storage_data
    for file, entries in shards.items():
        write_file(aside / file, entries, lambda entry: _whole(stored, pieces, entry))
    if len(shards) > 1:
        weight_map = {entry.name: file for file, entries in shards.items() for entry in entries}
        size = sum(entry.bytes for entries in shards.values() for entry in entries)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(stored: Stored, entries: Sequence[Entry], aside: Path) -> bool:
    """The model's configuration, with the type that its weights have now: ``from_pretrained`` makes it of that type."""
    if (stored.path / GENERATION).is_file():
        shutil.copyfile(stored.path / GENERATION, aside / GENERATION)
    if not (stored.path / CONFIG).is_file():
        return False
    config = json.loads((stored.path / CONFIG).read_text(encoding="utf-8"))
    size: dict[torch.dtype, int] = {}
    for entry in entries:
        if entry.dtype.is_floating_point:
            size[entry.dtype] = size.get(entry.dtype, 0) + entry.bytes
    if size:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _text(max(size, key=lambda dtype: size[dtype]))
    (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return True


def _publish(aside: Path, folder: Path) -> None:
    for file in aside.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if folder.exists():
        folder.rmdir()  # empty, as was checked
    os.rename(aside, folder)


# --- reading ---------------------------------------------------------------------------------------------------------


def _whole(stored: Stored, pieces: Mapping[Any, Any], entry: Entry) -> Tensor:
    """A tensor, put together from its pieces: one that is one piece is that piece, of others one is read at a time."""
    known = stored.tensor(_MODEL + entry.name)
    assert known is not None
    if len(known.chunks) == 1:
        return _piece(stored, pieces, entry.name, known, 0).to(entry.dtype)
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for i, chunk in enumerate(known.chunks):
        place = whole
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            place = place.narrow(dim, start, size)
        place.copy_(_piece(stored, pieces, entry.name, known, i))
    return whole


def _piece(stored: Stored, pieces: Mapping[Any, Any], name: str, known: TensorStorageMetadata, i: int) -> Tensor:
    chunk = known.chunks[i]
    at = pieces[MetadataIndex(_MODEL + name, chunk.offsets)]
    with (stored.path / at.relative_path).open("rb") as file:
        window = io.BufferedReader(_Window(file, at.offset, at.length))
        value = torch.load(window, map_location="cpu", weights_only=True)
    if not isinstance(value, Tensor) or value.shape != chunk.sizes:
        findings = Findings("this checkpoint")
        given = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        findings.add(where=f"{at.relative_path}: {name}", given=given, required=f"a tensor of {tuple(chunk.sizes)}")
        raise CheckpointError(findings, findings.subject)
    return value


class _Window(io.RawIOBase):
    """A part of an open file, as ``torch.load`` reads a file; the part itself is never in memory."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        count: int = self._file.readinto(memoryview(buffer)[: max(self._length - self._at, 0)])  # type: ignore[attr-defined]
        self._at += count
        return count


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
