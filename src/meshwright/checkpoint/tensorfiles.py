"""Safetensors files: opens all tensors of a folder by name, and writes a file tensor by tensor.

    8 bytes   the header's length, little-endian
    header    JSON: name → {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, padded with spaces
    data      the tensors' bytes, one after another

The safetensors package reads. Writing is our own, since the package's ``save_file`` needs all tensors of a file in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.lazy_tensor import FromFile, LazyTensor
from meshwright.errors import Findings
from meshwright.layout import in_one_dim

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 6  # most file names in an error
FORMAT = {"format": "pt"}  # transformers refuses a file without this metadata

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


# --- reading ---------------------------------------------------------------------------------------------------------


def open_folder(path: Path) -> dict[str, LazyTensor]:
    """Opens every tensor of a folder of weights, or of a single file, without reading values.

    Returns:
        Name → lazy tensor.

    Raises:
        PlanError: with every problem: no such folder, no files of weights, a file that is missing or damaged, a tensor that
            the index names and its file lacks.
    """
    findings = Findings("this folder")
    names_by_file = _weight_map(path, findings)
    findings.raise_if_any()
    tensors: dict[str, LazyTensor] = {}
    for file, expected in names_by_file.items():
        in_file = _open_file(file, findings)
        tensors |= in_file
        lacking = set(expected) - set(in_file) if in_file else ()  # an empty file has been reported already
        for name in sorted(lacking):
            findings.add(where=str(file), given=f"no {name}", required=f"{name}, which {INDEX} says is in it")
    findings.raise_if_any()
    return tensors


def _weight_map(path: Path, findings: Findings) -> dict[Path, tuple[str, ...]]:
    """File → names of the tensors that the index expects in it; no names if there is no index.

    Adds a finding if there are no files of weights, or several without an index.
    """
    if path.is_file():
        return {path: ()}
    if (path / INDEX).is_file():
        return _indexed(path, findings)
    if (path / WEIGHTS).is_file():
        return {path / WEIGHTS: ()}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) == 1:
        return {files[0]: ()}
    given = "no such folder"
    if path.is_dir():
        shown = (files or sorted(path.iterdir()))[:_SHOWN]
        given = ", ".join(file.name for file in shown) or "an empty folder"
    required = f"{WEIGHTS}, or {INDEX} and its files"
    fix = "model.save_pretrained(folder)  # of transformers; weights in other formats are not read"
    findings.add(where=str(path), given=given, required=required, fix=fix)
    return {}


def _indexed(path: Path, findings: Findings) -> dict[Path, tuple[str, ...]]:
    """File → names of its tensors, from ``model.safetensors.index.json``. Adds a finding if the index is not valid."""
    names: dict[Path, tuple[str, ...]] = {}
    try:
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        required = '{"weight_map": {name of a tensor: name of its file}}'
        findings.add(where=str(path / INDEX), given=f"{type(error).__name__}: {error}", required=required)
        return {}
    for name, file in pairs:
        if Path(file).name != file:
            findings.add(where=str(path / INDEX), given=file, required="the name of a file in this folder")
        names[path / file] = (*names.get(path / file, ()), name)
    return names


def _open_file(file: Path, findings: Findings) -> dict[str, LazyTensor]:
    """Name → lazy tensor, for the tensors of one file. Adds a finding if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, LazyTensor] = {}
    try:
        opened = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            part = opened.get_slice(name)
            if (code := part.get_dtype()) not in DTYPES:
                findings.add(where=f"{file}: {name}", given=code, required=f"one of {', '.join(DTYPES)}")
                continue
            tensors[name] = FromFile(part.get_shape(), DTYPES[code], part)
    except (OSError, SafetensorError) as error:
        fix = "download it again: the file is cut off, or not in safetensors format" if file.exists() else ""
        given = "no such file" if not file.exists() else str(error)
        findings.add(where=str(file), given=given, required="a complete safetensors file", fix=fix)
    return tensors


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor to write, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the values."""
        return prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, specs: Iterable[TensorSpec], value_of: Callable[[TensorSpec], Tensor]) -> None:
    """Writes a safetensors file.

    Args:
        path: of the new file.
        specs: the tensors to write, in any order.
        value_of: returns the values of one tensor. Called once for each, in the order of ``in_order``; no value is kept.

    Raises:
        ValueError: a value has another shape or dtype than its spec.
    """
    ordered = in_order(specs)
    with open(path, "wb") as file:
        file.write(_header(ordered))
        for spec in ordered:
            value = value_of(spec)
            if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
                raise ValueError(f"{spec.name}: {value.dtype} {tuple(value.shape)}, not {spec.dtype} {spec.shape}")
            file.write(_bytes(value))
            del value  # before the next one is made


def in_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The tensors in the order in which a file has their values.

    The widest types come first, as in files of the safetensors package: each tensor then starts at a multiple of its width.
    """
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))


def _header(specs: Iterable[TensorSpec]) -> bytes:
    """The header's length and the header, padded with spaces to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": FORMAT}
    start = 0
    for spec in specs:
        offsets = [start, start + spec.bytes]
        header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        start += spec.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(value: Tensor) -> Any:
    """A tensor's bytes, without a copy if the tensor is contiguous."""
    return in_one_dim(value.detach().cpu()).view(torch.uint8).numpy().data
