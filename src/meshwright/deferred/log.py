"""``Log``: ops on deferred tensors in program order, and their replay."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.deferred.memory import LARGE, allocate, bytes_of, trim
from meshwright.deferred.operation import mapped, tensors_in

Storages = dict[int, torch.UntypedStorage]  # cell → a real storage with its values


class Ref(NamedTuple):
    """A tensor as a view of a cell's storage. Stride and offset are in elements."""

    cell: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, over this storage."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor  # no public function makes a negative view


class GeneratorState(NamedTuple):
    """Stands for a `torch.Generator` among the arguments of an op."""

    state: Tensor


@dataclasses.dataclass(frozen=True)
class LoggedOp:
    """One op on deferred tensors."""

    func: Any  # an OpOverload
    args: Any  # with a `Ref` for each deferred tensor and a copy of each real one
    kwargs: dict[str, Any]
    reads: frozenset[int]  # the cells whose old values it uses
    writes: frozenset[int]  # the cells that it changes or makes
    kills: frozenset[int]  # the cells that it overwrites as a whole
    fresh: tuple[Ref | None, ...]  # one for each output tensor; None: the output is an argument
    state: Tensor | None  # of the default generator before the op, if the op may draw from it
    default_dtype: torch.dtype


class Log:
    """The ops in program order, and the size in bytes of every cell."""

    def __init__(self) -> None:
        self.ops: dict[int, LoggedOp] = {}
        self.nbytes: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}  # cell → numbers of the ops that write it, ascending
        self._length = 0

    def cell(self, nbytes: int) -> int:
        """The number of a new cell."""
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def add(self, op: LoggedOp) -> None:
        self.ops[self._length] = op
        for cell in op.writes:
            self._writers.setdefault(cell, []).append(self._length)
        self._length += 1

    def needed(self, cells: Iterable[int]) -> list[int]:
        """The numbers of the ops from which the current values of `cells` follow, ascending."""
        indices: set[int] = set()
        seen: set[tuple[int, int]] = set()
        wanted = [(cell, self._length) for cell in cells]
        while wanted:
            cell, before = wanted.pop()
            for index in reversed(self._writers.get(cell, ())):
                if index >= before:
                    continue
                if (cell, index) in seen:  # then everything before it has been seen too
                    break
                seen.add((cell, index))
                op = self.ops[index]
                if index not in indices:
                    indices.add(index)
                    wanted += [(read, index) for read in op.reads]
                if cell in op.kills:
                    break
        return sorted(indices)

    def keep(self, cells: Iterable[int]) -> None:
        """Drops all ops from which the values of `cells` do not follow."""
        self.ops = {index: self.ops[index] for index in self.needed(cells)}
        self._writers = {}
        for index, op in self.ops.items():
            for cell in op.writes:
                self._writers.setdefault(cell, []).append(index)

    def evaluate(self, cells: Iterable[int]) -> Storages:
        """New storages with the current values of `cells`. The state of generators is restored."""
        cells = frozenset(cells)
        order = self.needed(cells)
        last = {cell: i for i in order for cell in self.ops[i].reads | self.ops[i].writes}
        storages: Storages = {}
        rng = torch.get_rng_state()
        try:
            with without_caller_modes():
                for i in order:
                    op = self.ops[i]
                    if op.state is not None:
                        torch.set_rng_state(op.state)
                    self.run(op, storages)
                    for cell in (op.reads | op.writes) - cells:
                        if last[cell] == i:  # no later op needs its memory
                            storages.pop(cell, None)
                return {cell: self._storage(storages, cell) for cell in cells}
        finally:
            torch.set_rng_state(rng)

    def tensor(self, ref: Ref) -> Tensor:
        """The current value of `ref`, in new memory."""
        with without_caller_modes():
            tensor = ref.view(self.evaluate([ref.cell])[ref.cell])
            return tensor if self.covers(ref) else tensor.clone()

    def covers(self, ref: Ref) -> bool:
        """Whether the view contains all of its storage. (No op writes to a view that overlaps itself.)"""
        return math.prod(ref.size) * ref.dtype.itemsize == self.nbytes[ref.cell]

    def run(self, op: LoggedOp, storages: Storages, generator: torch.Generator | None = None) -> None:
        """Runs one op on these storages. ``generator``: replaces a logged generator, with its current state."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return leaf.view(self._storage(storages, leaf.cell))
            if isinstance(leaf, GeneratorState):
                return generator or torch.Generator().set_state(leaf.state)
            return leaf

        args, kwargs = mapped(real, (op.args, op.kwargs))
        if any(ref and self.nbytes[ref.cell] >= LARGE for ref in op.fresh):
            trim()
        with _default_dtype(op.default_dtype):
            outputs = tensors_in(op.func(*args, **kwargs))
        for ref, output in zip(op.fresh, outputs, strict=True):
            if ref is not None:
                storages[ref.cell] = self._storage_for(output, ref)

    def _storage(self, storages: Storages, cell: int) -> torch.UntypedStorage:
        if cell not in storages:
            storages[cell] = allocate(self.nbytes[cell])
        return storages[cell]

    def _storage_for(self, output: Tensor, ref: Ref) -> torch.UntypedStorage:
        """The storage of an output if the output has the geometry of `ref`, else a copy that has."""
        storage = output.untyped_storage()
        expected = (self.nbytes[ref.cell], ref.size, ref.stride, ref.offset, ref.conj, ref.neg)
        geometry = (storage.nbytes(), output.size(), output.stride(), output.storage_offset())
        if (*geometry, output.is_conj(), output.is_neg()) == expected:
            return storage
        fresh = allocate(self.nbytes[ref.cell])
        ref.view(fresh).copy_(output)
        return fresh


def ref_of(tensor: Tensor, cell: int) -> Ref:
    offset, conj, neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
    return Ref(cell, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset, conj, neg)


def refs_in(tree: Any) -> list[Ref]:
    refs: list[Ref] = []
    mapped(lambda leaf: refs.append(leaf) if isinstance(leaf, Ref) else None, tree)
    return refs


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor with the same strides: of its storage, or of the tensor alone if that is smaller."""
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.itemsize < storage.nbytes():
        return tensor.detach().clone()
    copy = bytes_of(storage).clone().untyped_storage()
    return ref_of(tensor, cell=0).view(copy)


@contextlib.contextmanager
def without_caller_modes() -> Iterator[None]:
    """Switches off the caller's autograd, inference mode and autocast for a replay."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
