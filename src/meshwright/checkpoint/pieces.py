"""``LocalPiece``: a rank's slices of a tensor, as DCP chunks; and DCP's planners for saving and loading pieces.

A rank's slice may be several ranges of a dim: of a fused QKV weight, a rank holds rows of each of three blocks. Each
combination of ranges is one DCP chunk of the full tensor. So a checkpoint does not depend on the layout, and loads into any
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.checkpoint.folder import OnProgress, ignore_progress
from meshwright.checkpoint.rank_agreement import raising_plain_errors
from meshwright.recipe import Slices

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class LocalPiece:
    """The part of a tensor that this rank holds.

    Attributes:
        name: in the checkpoint.
        shape: of the full tensor.
        local: this rank's part, with the shape of the slices.
        slices: for each dim, ranges of the full tensor, in the order in which they lie in ``local``.
    """

    name: str
    shape: tuple[int, ...]
    local: Tensor
    slices: Slices

    @classmethod
    def of_full_tensor(cls, name: str, value: Tensor) -> LocalPiece:
        """The piece of a tensor that this rank holds in full."""
        return cls(name, tuple(value.shape), value, tuple(((0, n),) for n in value.shape))

    def chunks(self) -> Iterator[tuple[Offsets, Tensor]]:
        """For each chunk: its offsets in the full tensor, and its part of the local tensor.

        Slices ``((0, 2), (4, 6)), ((0, 3),)`` of a tensor of shape (8, 3) give the chunks at (0, 0) and (4, 0), each of
        shape (2, 3).
        """
        if not prod(self.shape):
            yield (0,) * len(self.shape), self.local
            return
        local_starts = [list(accumulate((stop - start for start, stop in ranges), initial=0)) for ranges in self.slices]
        for combination in product(*(range(len(ranges)) for ranges in self.slices)):
            part, offsets = self.local, []
            for dim, i in enumerate(combination):
                start, stop = self.slices[dim][i]
                part = part.narrow(dim, local_starts[dim][i], stop - start)
                offsets.append(start)
            yield tuple(offsets), part


class _Chunks:
    """The chunks of many pieces, by name and offsets."""

    def __init__(self, pieces: Iterable[LocalPiece]) -> None:
        self.pieces = {piece.name: piece for piece in pieces}
        self._parts = {(p.name, offsets): part for p in self.pieces.values() for offsets, part in p.chunks()}

    def metadata(self, name: str) -> list[ChunkStorageMetadata]:
        """DCP's descriptions of a piece's chunks."""
        return [_chunk(offsets, part) for offsets, part in self.pieces[name].chunks()]

    def at(self, index: MetadataIndex) -> Tensor:
        """The part of the local tensor that a chunk lies in."""
        return self._parts[index.fqn, tuple(index.offset or ())].detach()


class PieceSaver(DefaultSavePlanner):
    """DCP's planner for saving pieces. DCP writes a chunk that several ranks hold once, on the rank with least to write."""

    def __init__(self, pieces: Iterable[LocalPiece], on_progress: OnProgress = ignore_progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks, self._on_progress = _Chunks(pieces), on_progress

    def create_local_plan(self) -> SavePlan:
        """A plan with every chunk that this rank holds."""
        with raising_plain_errors():
            self.plan = SavePlan(list(self._items()))
            return self.plan

    def _items(self) -> Iterator[WriteItem]:
        for piece in self._chunks.pieces.values():
            properties = TensorProperties(dtype=piece.local.dtype)
            for offsets, part in piece.chunks():
                data = TensorWriteData(_chunk(offsets, part), properties, torch.Size(piece.shape))
                yield WriteItem(MetadataIndex(piece.name, offsets), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's plan; its metadata also has the nested keys of each name, which ``dcp_to_torch_save`` restores."""
        plans, metadata = super().create_global_plan(all_plans)
        nested_keys = {name: _nested_keys(name) for name in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=nested_keys)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._chunks.at(index)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self._on_progress()
        return self._chunks.at(write_item.index)


class PieceLoader(DefaultLoadPlanner):
    """DCP's planner for loading into pieces. Reads of each saved chunk the part that overlaps with a piece.

    Args:
        names: name of a piece → its name in the checkpoint. A piece that is absent has the same name there.
    """

    def __init__(
        self,
        pieces: Iterable[LocalPiece],
        names: Mapping[str, str] | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks, self._names, self._on_progress = _Chunks(pieces), names or {}, on_progress

    def create_local_plan(self) -> LoadPlan:
        """A plan that reads every chunk of this rank's pieces."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._chunks.pieces.items():
            saved_name = self._names.get(name, name)
            saved = self.metadata.state_dict_metadata[saved_name]
            assert isinstance(saved, TensorStorageMetadata)
            if not prod(piece.shape):
                continue
            reads = create_read_items_for_chunk_list(name, saved, self._chunks.metadata(name))
            items += [replace(read, storage_index=replace_name(read.storage_index, saved_name)) for read in reads]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the local tensor to read into."""
        part = self._chunks.at(read_item.dest_index)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Called after a read. The values have been read into the local tensor itself, so nothing is left to copy."""
        self._on_progress()


def replace_name(index: MetadataIndex, name: str) -> MetadataIndex:
    """The index with the name of another tensor; offset and number of the chunk stay."""
    return MetadataIndex(name, index.offset, index.index)


def _chunk(offsets: Offsets, part: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), part.size())


def _nested_keys(name: str) -> tuple[str, ...]:
    """The nested keys of a name in the dict of ``get_state_dict``.

    ``optimizer.state.a.weight.exp_avg`` → ``("optimizer", "state", "a.weight", "exp_avg")``. Parameter names contain dots, so
    splitting at each dot would be wrong.
    """
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        state, _, rest = rest.partition(".")
        parameter, _, key = rest.rpartition(".")
        return kind, state, parameter, key
    return kind, rest
