"""DCP's reader and writer of files. The writer computes a checksum for each piece; the reader does not trust pickles."""

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

from meshwright.checkpoint.folder import File, OnProgress, described, ignore_progress
from meshwright.checkpoint.rank_agreement import raising_plain_errors

METADATA = ".metadata"

# The types that DCP pickles into its metadata. The unpickler refuses all others.
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
    """Writes this rank's chunks, one at a time, into files that no other rank writes to.

    Attributes:
        files: after writing, the files of this rank: name → size and checksums.
    """

    def __init__(self, path: Path, on_progress: OnProgress = ignore_progress) -> None:
        super().__init__(path, sync_files=True, overwrite=False)
        self._folder, self._on_progress = path, on_progress
        self.files: Mapping[str, File] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes as DCP does, then reads each chunk from its file and computes the checksum."""
        with raising_plain_errors():
            future = super().write_data(plan, planner)
            chunks: dict[str, list[tuple[str, int, int]]] = {}  # file → (name of a tensor, offset, length)
            for result in future.wait():
                stored = result.storage_data
                chunks.setdefault(stored.relative_path, []).append((result.index.fqn, stored.offset, stored.length))
            self.files = {
                name: described(self._folder / name, parts, self._on_progress) for name, parts in chunks.items()
            }
            return future


class Reader(FileSystemReader):
    """Reads chunks with ``weights_only``, and the metadata with an unpickler that allows DCP's own types alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata. Raises pickle.UnpicklingError if the file names a type that is not DCP's own."""
        metadata = read_metadata(self._folder)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of a checkpoint: the file and offset of each chunk of each tensor.

    Raises:
        pickle.UnpicklingError: the file names a type that is not DCP's own.
    """
    with (path / METADATA).open("rb") as opened:
        metadata = _MetadataUnpickler(opened).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{METADATA} holds a {type(metadata).__name__}")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the types of ``_ALLOWED``. Without this limit, a pickle could run any code of its author."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed type of this name, or a dtype or layout of torch."""
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(constant := getattr(torch, name, None), torch.dtype | torch.layout):
            return constant
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's {METADATA}")
