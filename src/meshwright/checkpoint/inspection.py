"""``Inspection``: the contents of a checkpoint as facts, for a person or a program.

No tensor is made. All bytes of the files are read and compared with their checksums, unless only sizes are asked for.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.checkpoint.folder import MANIFEST, Manifest, complete, damage, find, read_manifest
from meshwright.checkpoint.storage import METADATA, read_metadata
from meshwright.errors import CheckpointError, Finding
from meshwright.names import by_number

_STATE = "optimizer.state."


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a checkpoint.

    Attributes:
        kind: ``model``, ``optimizer`` or ``rng``.
        name: of a model's tensor, its name on one device; of optimizer state, the parameter's name; of a generator's state,
            ``rank.kind``.
        key: of optimizer state, such as ``exp_avg``; empty for other kinds.
        shape: of the full tensor.
        dtype: of the full tensor, such as ``float32``.
        pieces: number of chunks that it was saved as.
        bytes: size of all values.
    """

    kind: str
    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    pieces: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint.

    Attributes:
        path: the directory of the checkpoint.
        step: number of optimizer steps before the save; -1 if the manifest cannot be read.
        about: time, versions, mesh, branches, stages, aliases.
        plan: as YAML; empty if a plain module was saved.
        files: name → size in bytes, as written.
        tensors: of model, optimizer and generators; empty if the metadata cannot be read.
        problems: one for each file that is missing, short or changed.
        checked: ``contents`` if checksums were compared, ``sizes`` if only sizes.
    """

    path: Path
    step: int = -1
    about: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    tensors: tuple[TensorFacts, ...] = ()
    problems: tuple[Finding, ...] = ()
    checked: str = "contents"

    @property
    def whole(self) -> bool:
        return not self.problems

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    def of(self, kind: str) -> tuple[TensorFacts, ...]:
        """The tensors of one kind: ``model``, ``optimizer`` or ``rng``."""
        return tuple(t for t in self.tensors if t.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values, for JSON."""
        return {
            "path": str(self.path), "step": self.step, "whole": self.whole, "checked": self.checked,
            "bytes": self.bytes, **self.about, "plan": self.plan, "files": dict(self.files),
            "tensors": [{**vars(t), "shape": list(t.shape)} for t in self.tensors],
            "problems": [vars(p) for p in self.problems],
        }  # fmt: skip


def inspect(path: str | os.PathLike[str], *, contents: bool = True) -> tuple[Inspection, ...]:
    """Inspects the checkpoint at a path, or all checkpoints of a folder, oldest first.

    Args:
        contents: whether to compare checksums. False compares only the sizes of files.

    Raises:
        CheckpointError: the path has no checkpoint.
    """
    checkpoint = find(path)
    paths = [checkpoint] if checkpoint == Path(path) else complete(path)
    return tuple(inspect_one(path, contents=contents) for path in paths)


def unfinished(path: Path) -> tuple[str, ...]:
    """Names of checkpoints in a folder that are being written, or were never completed."""
    return tuple(sorted(p.name for p in path.glob(".saving-*")))


def inspect_one(path: Path, *, contents: bool = True) -> Inspection:
    """Inspects one checkpoint, complete or damaged."""
    checked = "contents" if contents else "sizes"
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Inspection(path, problems=error.findings, checked=checked)
    problems = [p for name in sorted(manifest.files) if (p := _problem(path, name, manifest, contents)) is not None]
    damaged = {Path(problem.where).name for problem in problems}
    tensors: tuple[TensorFacts, ...] = ()
    if METADATA not in damaged:
        try:
            tensors = tuple(_tensors(path))
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
            problems.append(Finding(str(path / METADATA), f"cannot be read: {error}", "as it was written"))
    plan = path / "plan.yaml"
    text = plan.read_text(encoding="utf-8") if plan.is_file() and plan.name not in damaged else ""
    files = {name: file.size for name, file in manifest.files.items()}
    files[MANIFEST] = (path / MANIFEST).stat().st_size
    return Inspection(path, manifest.step, manifest.about, text, files, tensors, tuple(problems), checked)


def raise_if_damaged(inspections: Sequence[Inspection]) -> None:
    """Raises CheckpointError with the problems of all inspections, if there are any."""
    if problems := [problem for inspection in inspections for problem in inspection.problems]:
        raise CheckpointError(problems, "this checkpoint" if len(inspections) == 1 else "these checkpoints")


def _problem(path: Path, name: str, manifest: Manifest, contents: bool) -> Finding | None:
    """The damage of one file, or None. ``contents=False`` compares only the size."""
    expected, on_disk = manifest.files[name], path / name
    if not contents and on_disk.is_file() and on_disk.stat().st_size == expected.size:
        return None
    return damage(path, name, expected)


def _tensors(path: Path) -> Iterator[TensorFacts]:
    """The tensors in the order of their names in DCP's metadata: the model's first, then the optimizer's."""
    tensors = read_metadata(path).state_dict_metadata
    for name in sorted(tensors, key=by_number):
        tensor = tensors[name]
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        kind, _, rest = name.partition(".")
        key = ""
        if name.startswith(_STATE):
            rest, _, key = name.removeprefix(_STATE).rpartition(".")
        shape, dtype = tuple(tensor.size), tensor.properties.dtype
        size = prod(shape) * dtype.itemsize
        yield TensorFacts(kind, rest, key, shape, str(dtype).removeprefix("torch."), len(tensor.chunks), size)
