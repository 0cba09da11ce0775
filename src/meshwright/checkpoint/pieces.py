"""A tensor's slices on this rank, as the chunks that DCP knows; its planners over them.

A recipe's slice may be several ranges of a dim (a fused QKV holds its rows of each block): each combination of ranges is a
chunk of the whole tensor. So what is saved never knows how it was cut, and loads where it is cut otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
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

from meshwright.checkpoint.folder import Moved, nobody
from meshwright.checkpoint.talk import plainly
from meshwright.recipe import Slices

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor.

    Attributes:
        name: in the checkpoint.
        shape: of the whole tensor.
        local: what is held, of the shape of the slices.
        slices: per dim, ranges of the whole tensor, in local order.
    """

    name: str
    shape: tuple[int, ...]
    local: Tensor
    slices: Slices

    @classmethod
    def whole(cls, name: str, value: Tensor) -> Piece:
        """A tensor that this rank holds all of."""
        return cls(name, tuple(value.shape), value, tuple(((0, n),) for n in value.shape))

    def chunks(self) -> Iterator[tuple[Offsets, Tensor]]:
        """(offsets in the whole tensor, the part of the local tensor that stands there)."""
        if not prod(self.shape):
            yield (0,) * len(self.shape), self.local
            return
        starts = [[sum(b - a for a, b in ranges[:i]) for i in range(len(ranges))] for ranges in self.slices]
        for combination in product(*(range(len(ranges)) for ranges in self.slices)):
            part, offsets = self.local, []
            for dim, i in enumerate(combination):
                start, stop = self.slices[dim][i]
                part = part.narrow(dim, starts[dim][i], stop - start)
                offsets.append(start)
            yield tuple(offsets), part


class _Chunks:
    """The chunks of many pieces, by name and offsets."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = {piece.name: piece for piece in pieces}
        self._found = {(p.name, at): part for p in self.pieces.values() for at, part in p.chunks()}

    def of(self, name: str) -> list[ChunkStorageMetadata]:
        return [_chunk(at, part) for at, part in self.pieces[name].chunks()]

    def at(self, index: MetadataIndex) -> Tensor:
        return self._found[index.fqn, tuple(index.offset or ())].detach()


class PieceSaver(DefaultSavePlanner):
    """DCP's planner for saving, over pieces. Copies are written once, by whichever of their ranks has least to write."""

    def __init__(self, pieces: Iterable[Piece], moved: Moved = nobody) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks, self._moved = _Chunks(pieces), moved

    def create_local_plan(self) -> SavePlan:
        """Every chunk that this rank holds."""
        with plainly():
            self.plan = SavePlan(list(self._items()))
            return self.plan

    def _items(self) -> Iterator[WriteItem]:
        for piece in self._chunks.pieces.values():
            properties = TensorProperties(dtype=piece.local.dtype)
            for at, part in piece.chunks():
                data = TensorWriteData(_chunk(at, part), properties, torch.Size(piece.shape))
                yield WriteItem(MetadataIndex(piece.name, at), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As DCP makes it, with the nesting that ``dcp_to_torch_save`` gives back."""
        plans, metadata = super().create_global_plan(all_plans)
        nested = {name: _path(name) for name in metadata.state_dict_metadata}
        return plans, replace(metadata, planner_data=nested)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._chunks.at(index)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self._moved()
        return self._chunks.at(write_item.index)


class PieceLoader(DefaultLoadPlanner):
    """DCP's planner for loading, into pieces: of each saved chunk what overlaps.

    Args:
        names: name of a piece → its name in the checkpoint, where that is another.
    """

    def __init__(self, pieces: Iterable[Piece], names: Mapping[str, str] | None = None, moved: Moved = nobody) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks, self._names, self._moved = _Chunks(pieces), names or {}, moved

    def create_local_plan(self) -> LoadPlan:
        """What to read, of what."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._chunks.pieces.items():
            saved = self._names.get(name, name)
            known = self.metadata.state_dict_metadata[saved]
            assert isinstance(known, TensorStorageMetadata)
            if not prod(piece.shape):
                continue
            reads = create_read_items_for_chunk_list(name, known, self._chunks.of(name))
            items += [replace(i, storage_index=replace_name(i.storage_index, saved)) for i in reads]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the local tensor that is read into."""
        part = self._chunks.at(read_item.dest_index)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It has been written in place."""
        self._moved()


def replace_name(index: MetadataIndex, name: str) -> MetadataIndex:
    """The index of the same chunk of a tensor of another name."""
    return MetadataIndex(name, index.offset, index.index)


def _chunk(at: Offsets, part: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(at), part.size())


def _path(name: str) -> tuple[str, ...]:
    """How ``get_state_dict`` nests what has this name: names of parameters have dots of their own."""
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        state, _, rest = rest.partition(".")
        parameter, _, key = rest.rpartition(".")
        return kind, state, parameter, key
    return kind, rest
