"""DCP's files. What it writes is described piece by piece; what it reads is not trusted."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.checkpoint.folder import File, Moved, described, nobody
from meshwright.checkpoint.talk import plainly

METADATA = ".metadata"

# What DCP pickles into its metadata, and nothing else.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class Writer(FileSystemWriter):
    """Writes this rank's chunks, one at a time, into files of its own.

    Attributes:
        files: of this rank, after writing: name → size and checksums.
    """

    def __init__(self, path: Path, moved: Moved = nobody) -> None:
        super().__init__(path, sync_files=True, overwrite=False)
        self._at, self._moved = path, moved
        self.files: Mapping[str, File] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As DCP does; then each chunk's checksum, of what the file has."""
        with plainly():
            future = super().write_data(plan, planner)
            pieces: dict[str, list[tuple[str, int, int]]] = {}
            for result in future.wait():
                at = result.storage_data
                pieces.setdefault(at.relative_path, []).append((result.index.fqn, at.offset, at.length))
            self.files = {name: described(self._at / name, parts, self._moved) for name, parts in pieces.items()}
            return future


class Reader(FileSystemReader):
    """Reads chunks (``weights_only``), and the metadata through a list of what may stand in it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._at = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises pickle.UnpicklingError where the file names anything but DCP's own types."""
        metadata = read_metadata(self._at)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(path: Path) -> Metadata:
    """Which piece of which tensor stands where in a checkpoint. Raises pickle.UnpicklingError as ``Reader`` does."""
    with (path / METADATA).open("rb") as opened:
        metadata = _Known(opened).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{METADATA} holds a {type(metadata).__name__}")
    return metadata


class _Known(pickle.Unpickler):
    """Unpickles DCP's metadata, and nothing else: whoever can write a pickle can otherwise run what he likes."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed type of this name; dtypes are torch's own constants."""
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's {METADATA}")
