"""Exports a checkpoint of any layout as a Hugging Face folder, in a plain process, with one tensor in memory at a time.

    verified checkpoint ─► model.* by name ─► files of a limited size ─► temporary folder ─► rename

Needs neither the model's code nor a process group: the checkpoint has all names, shapes and pieces. The names are those of
the model. A tied parameter is written once, under the first of its names, as transformers does.
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

from meshwright.checkpoint.load import StoredCheckpoint
from meshwright.checkpoint.rank_agreement import RankAgreement
from meshwright.checkpoint.tensorfiles import DTYPES, INDEX, WEIGHTS, TensorSpec, write_file
from meshwright.errors import CheckpointError, Findings
from meshwright.names import by_number

CONFIG, GENERATION = "config.json", "generation_config.json"
KINDS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype.is_floating_point}
_MODEL = "model."
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportResult:
    """The result of ``export``.

    Attributes:
        folder: the new folder.
        checkpoint: the checkpoint that was exported.
        step: number of optimizer steps of the checkpoint.
        tensors: number of tensors in all files of weights.
        bytes: size of these tensors.
        files: names of the files of weights.
        config: whether the folder has a config.json, without which ``from_pretrained`` cannot build the model.
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
) -> ExportResult:  # fmt: skip
    """Writes a checkpoint's model as safetensors, with ``config.json`` if the checkpoint has one.

    Args:
        checkpoint: a checkpoint, or a folder of checkpoints: then the newest.
        out: the folder to create. It may exist if it is empty.
        shard_size: the largest size of a file: a number of bytes, or with a unit (``500MB``). A larger tensor gets a file of
            its own.
        dtype: for floating-point tensors, such as ``bfloat16``. None: as saved.

    Raises:
        PlanError: an argument is wrong. Nothing has been written.
        CheckpointError: the checkpoint is damaged. Nothing has been written.
    """
    folder, findings = Path(out), Findings("this export")
    largest = _bytes_of(shard_size, findings)
    _check(folder, dtype, findings)
    findings.raise_if_any()
    stored = StoredCheckpoint.open(checkpoint, RankAgreement(None))
    saved = list(_specs(stored))
    if not saved:
        findings.add(where=str(stored.path), given="no tensors of a model", required="a checkpoint of a model")
        findings.raise_if_any()
    exported = saved if dtype is None else [_converted(spec, KINDS[dtype]) for spec in saved]
    shards = _shards(exported, largest)
    temporary = folder.with_name(f".exporting-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write(stored, shards, temporary)
        config = _write_config(stored, exported, temporary)
        _publish(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    size = sum(spec.bytes for spec in exported)
    return ExportResult(folder, stored.path, stored.manifest.step, len(exported), size, tuple(shards), config)


# --- arguments -------------------------------------------------------------------------------------------------------


def _bytes_of(size: str | int, findings: Findings) -> int:
    """A size such as ``500MB`` in bytes. Adds a finding if the text is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    unit = match[2] if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""
    factor = 1 if unit == "B" else _UNITS.get(unit, 0)
    count = int(float(match[1]) * factor) if match else 0
    if count < 1:
        findings.add(
            where="shard size",
            given=str(size),
            required="a size in bytes, such as 5GB or 500MB",
            fix="--shard-size 5GB",
        )
    return count


def _check(folder: Path, dtype: str | None, findings: Findings) -> None:
    """Adds a finding for an unknown dtype, and for a folder that is not empty."""
    if dtype is not None and dtype not in KINDS:
        findings.add(where="dtype", given=dtype, required=f"one of {', '.join(KINDS)}", fix="--dtype bfloat16")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = f"{folder.with_name(folder.name + '-2')}"
        findings.add(where=str(folder), given="exists already", required="a folder that does not exist yet", fix=fix)


# --- contents --------------------------------------------------------------------------------------------------------


def _specs(stored: StoredCheckpoint) -> Iterator[TensorSpec]:
    """The model's tensors in the order of their names, with numbers in names ordered as numbers."""
    names = [name for name in stored.metadata.state_dict_metadata if name.startswith(_MODEL)]
    for name in sorted(names, key=by_number):
        if (tensor := stored.tensor(name)) is not None:
            yield TensorSpec(name.removeprefix(_MODEL), tuple(tensor.size), tensor.properties.dtype)


def _converted(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """The tensor with another dtype, if its own is a floating-point type."""
    return replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec


def _shards(tensors: Sequence[TensorSpec], largest: int) -> dict[str, list[TensorSpec]]:
    """File name → its tensors. Fills one file after another, each up to ``largest`` bytes."""
    shards: list[list[TensorSpec]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + tensor.bytes > largest:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(stored: StoredCheckpoint, shards: Mapping[str, Sequence[TensorSpec]], directory: Path) -> None:
    """Writes the files of weights, and their index if there are several."""
    pieces = stored.metadata.storage_data
    for file, tensors in shards.items():
        write_file(directory / file, tensors, lambda spec: _full_tensor(stored, pieces, spec))
    if len(shards) > 1:
        weight_map = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
        size = sum(tensor.bytes for tensors in shards.values() for tensor in tensors)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(stored: StoredCheckpoint, tensors: Sequence[TensorSpec], directory: Path) -> bool:
    """Writes config.json, with the dtype of the exported weights, which ``from_pretrained`` uses; and generation_config.json.

    Returns:
        Whether the checkpoint has a config.json.
    """
    if (stored.path / GENERATION).is_file():
        shutil.copyfile(stored.path / GENERATION, directory / GENERATION)
    if not (stored.path / CONFIG).is_file():
        return False
    config = json.loads((stored.path / CONFIG).read_text(encoding="utf-8"))
    sizes: dict[torch.dtype, int] = {}  # floating-point type → bytes of its tensors
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    if sizes:
        most_used = max(sizes, key=lambda dtype: sizes[dtype])
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _text(most_used)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return True


def _publish(temporary: Path, folder: Path) -> None:
    """Waits until the files of the temporary folder are on disk, then renames the folder."""
    for file in temporary.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if folder.exists():
        folder.rmdir()  # _check has refused a folder that is not empty
    os.rename(temporary, folder)


# --- reading ---------------------------------------------------------------------------------------------------------


def _full_tensor(stored: StoredCheckpoint, pieces: Mapping[Any, Any], spec: TensorSpec) -> Tensor:
    """Reads a full tensor from its chunks, one chunk at a time, and converts it to the dtype of its spec.

    Args:
        pieces: DCP's index of a chunk → its file and offset.
    """
    saved = stored.tensor(_MODEL + spec.name)
    assert saved is not None
    if len(saved.chunks) == 1:
        return _chunk(stored, pieces, spec.name, saved, 0).to(spec.dtype)
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    for i, chunk in enumerate(saved.chunks):
        part = tensor
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(_chunk(stored, pieces, spec.name, saved, i))
    return tensor


def _chunk(
    stored: StoredCheckpoint, pieces: Mapping[Any, Any], name: str, saved: TensorStorageMetadata, i: int
) -> Tensor:
    """Reads chunk ``i`` of a tensor. Raises CheckpointError if it has another shape than the metadata says."""
    chunk = saved.chunks[i]
    stored_chunk = pieces[MetadataIndex(_MODEL + name, chunk.offsets)]
    with (stored.path / stored_chunk.relative_path).open("rb") as file:
        window = io.BufferedReader(_Window(file, stored_chunk.offset, stored_chunk.length))
        value = torch.load(window, map_location="cpu", weights_only=True)
    if not isinstance(value, Tensor) or value.shape != chunk.sizes:
        findings = Findings("this checkpoint")
        given = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        where = f"{stored_chunk.relative_path}: {name}"
        findings.add(where=where, given=given, required=f"a tensor of {tuple(chunk.sizes)}")
        raise CheckpointError(findings, findings.subject)
    return value


class _Window(io.RawIOBase):
    """A range of an open file, as a file object for ``torch.load``. The range is not copied into memory."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._position)
        remaining = max(self._length - self._position, 0)
        count: int = self._file.readinto(memoryview(buffer)[:remaining])  # type: ignore[attr-defined]
        self._position += count
        return count


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
