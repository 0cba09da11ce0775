"""What is in a checkpoint: facts, for a person or a program. Nothing of a tensor is made; of the files all bytes are read,
to be compared with their checksums, unless only sizes are asked for."""

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
        name: of a model's tensor, as on one device; of the optimizer's, the parameter's; of a generator, ``rank.kind``.
        key: of the optimizer's state: ``exp_avg``; else empty.
        shape, dtype: of the whole tensor.
        pieces: how many it was saved as.
        bytes: of its values.
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
    """A checkpoint.

    Attributes:
        path: where it is.
        step: optimizer steps that were done; -1 where the manifest cannot be read.
        about: time, versions, mesh, branches, stages, aliases.
        plan: as YAML; empty for a plain module's.
        files: name → bytes, as they were written.
        tensors: of model, optimizer and generators; none where the metadata is lost.
        problems: what is missing, short or changed.
        checked: ``contents``, or ``sizes`` alone.
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
        """Of all files."""
        return sum(self.files.values())

    def of(self, kind: str) -> tuple[TensorFacts, ...]:
        return tuple(t for t in self.tensors if t.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "path": str(self.path), "step": self.step, "whole": self.whole, "checked": self.checked,
            "bytes": self.bytes, **self.about, "plan": self.plan, "files": dict(self.files),
            "tensors": [{**vars(t), "shape": list(t.shape)} for t in self.tensors],
            "problems": [vars(p) for p in self.problems],
        }  # fmt: skip


def inspect(path: str | os.PathLike[str], *, contents: bool = True) -> tuple[Inspection, ...]:
    """The checkpoint at a path, or all in a folder of them, oldest first.

    Args:
        contents: False compares the sizes of files, and not what is in them.

    Raises:
        CheckpointError: there is none.
    """
    at = find(path)
    return tuple(look(p, contents=contents) for p in ([at] if at == Path(path) else complete(path)))


def unfinished(path: Path) -> tuple[str, ...]:
    """What was begun in a folder of checkpoints and never completed, or is being written now."""
    return tuple(sorted(p.name for p in path.glob(".saving-*")))


def look(path: Path, *, contents: bool = True) -> Inspection:
    """One checkpoint, whole or damaged."""
    checked = "contents" if contents else "sizes"
    try:
        manifest = read_manifest(path)
    except CheckpointError as lost:
        return Inspection(path, problems=lost.findings, checked=checked)
    problems = [p for name in sorted(manifest.files) if (p := _problem(path, name, manifest, contents)) is not None]
    gone = {Path(problem.where).name for problem in problems}
    tensors: tuple[TensorFacts, ...] = ()
    if METADATA not in gone:
        try:
            tensors = tuple(_tensors(path))
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
            problems.append(Finding(str(path / METADATA), f"cannot be read: {error}", "as it was written"))
    plan = path / "plan.yaml"
    text = plan.read_text(encoding="utf-8") if plan.is_file() and plan.name not in gone else ""
    files = {name: file.size for name, file in manifest.files.items()}
    files[MANIFEST] = (path / MANIFEST).stat().st_size
    return Inspection(path, manifest.step, manifest.about, text, files, tensors, tuple(problems), checked)


def raise_if_damaged(inspections: Sequence[Inspection]) -> None:
    """Raises CheckpointError with every problem of all of them."""
    if problems := [problem for inspection in inspections for problem in inspection.problems]:
        raise CheckpointError(problems, "this checkpoint" if len(inspections) == 1 else "these checkpoints")


def _problem(path: Path, name: str, manifest: Manifest, contents: bool) -> Finding | None:
    file, at = manifest.files[name], path / name
    if not contents and at.is_file() and at.stat().st_size == file.size:
        return None
    return damage(path, name, file)


def _tensors(path: Path) -> Iterator[TensorFacts]:
    """In the order of their names; the model's first, then the optimizer's."""
    tensors = read_metadata(path).state_dict_metadata
    for name in sorted(tensors, key=by_number):
        known = tensors[name]
        if not isinstance(known, TensorStorageMetadata):
            continue
        kind, _, rest = name.partition(".")
        key = ""
        if name.startswith(_STATE):
            rest, _, key = name.removeprefix(_STATE).rpartition(".")
        shape, dtype = tuple(known.size), known.properties.dtype
        size = prod(shape) * dtype.itemsize
        yield TensorFacts(kind, rest, key, shape, str(dtype).removeprefix("torch."), len(known.chunks), size)
