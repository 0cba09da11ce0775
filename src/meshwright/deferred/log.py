"""The log: ops on deferred tensors in program order, and their replay."""

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

Held = dict[int, torch.UntypedStorage]  # cell → a real storage with its content


class Ref(NamedTuple):
    """A tensor as a view of a cell's storage: sizes, strides and offset in elements."""

    cell: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor  # no public function makes a negative view


class GeneratorState(NamedTuple):
    """Stands for an explicit `torch.Generator` argument."""

    state: Tensor


@dataclasses.dataclass(frozen=True)
class Entry:
    """One op on deferred tensors."""

    func: Any  # an OpOverload
    args: Any  # with a `Ref` for each deferred tensor and a copy of each real one
    kwargs: dict[str, Any]
    reads: frozenset[int]  # the cells whose content before matters
    writes: frozenset[int]  # the cells it changes or makes
    kills: frozenset[int]  # those of which nothing from before remains
    fresh: tuple[Ref | None, ...]  # for each output tensor; None: it is an argument
    state: Tensor | None  # the default generator's before, if the op may draw from it
    default_dtype: torch.dtype


class Log:
    """Entries in program order, and the size in bytes of every cell."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.nbytes: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}  # cell → its entries, ascending
        self._length = 0

    def cell(self, nbytes: int) -> int:
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def add(self, entry: Entry) -> None:
        self.entries[self._length] = entry
        for cell in entry.writes:
            self._writers.setdefault(cell, []).append(self._length)
        self._length += 1

    def needed(self, cells: Iterable[int]) -> list[int]:
        """The entries that the present content of `cells` comes from, ascending."""
        indices: set[int] = set()
        seen: set[tuple[int, int]] = set()
        wanted = [(cell, self._length) for cell in cells]
        while wanted:
            cell, before = wanted.pop()
            for index in reversed(self._writers.get(cell, ())):
                if index >= before:
                    continue
                if (cell, index) in seen:  # and so has been all before it
                    break
                seen.add((cell, index))
                entry = self.entries[index]
                if index not in indices:
                    indices.add(index)
                    wanted += [(read, index) for read in entry.reads]
                if cell in entry.kills:
                    break
        return sorted(indices)

    def keep(self, cells: Iterable[int]) -> None:
        """Forget what the content of `cells` does not come from."""
        self.entries = {index: self.entries[index] for index in self.needed(cells)}
        self._writers = {}
        for index, entry in self.entries.items():
            for cell in entry.writes:
                self._writers.setdefault(cell, []).append(index)

    def evaluate(self, cells: Iterable[int]) -> Held:
        """New storages with the present content of `cells`. Generators are left as they were."""
        cells = frozenset(cells)
        order = self.needed(cells)
        last = {cell: i for i in order for cell in self.entries[i].reads | self.entries[i].writes}
        held: Held = {}
        rng = torch.get_rng_state()
        try:
            with plainly():
                for i in order:
                    entry = self.entries[i]
                    if entry.state is not None:
                        torch.set_rng_state(entry.state)
                    self.run(entry, held)
                    for cell in (entry.reads | entry.writes) - cells:
                        if last[cell] == i:  # its memory is not needed any more
                            held.pop(cell, None)
                return {cell: self._held(held, cell) for cell in cells}
        finally:
            torch.set_rng_state(rng)

    def tensor(self, ref: Ref) -> Tensor:
        """The present value of `ref`, in memory of its own."""
        with plainly():
            tensor = ref.view(self.evaluate([ref.cell])[ref.cell])
            return tensor if self.covers(ref) else tensor.clone()

    def covers(self, ref: Ref) -> bool:
        """Is all of the storage in this view? (Ops do not write to views that overlap themselves.)"""
        return math.prod(ref.size) * ref.dtype.itemsize == self.nbytes[ref.cell]

    def run(self, entry: Entry, held: Held, generator: torch.Generator | None = None) -> None:
        """Run one entry on the storages in `held`. A generator given resumes from where it is."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return leaf.view(self._held(held, leaf.cell))
            if isinstance(leaf, GeneratorState):
                return generator or torch.Generator().set_state(leaf.state)
            return leaf

        args, kwargs = mapped(real, (entry.args, entry.kwargs))
        if any(ref and self.nbytes[ref.cell] >= LARGE for ref in entry.fresh):
            trim()
        with _default_dtype(entry.default_dtype):
            outputs = tensors_in(entry.func(*args, **kwargs))
        for ref, output in zip(entry.fresh, outputs, strict=True):
            if ref is not None:
                held[ref.cell] = self._own(output, ref)

    def _held(self, held: Held, cell: int) -> torch.UntypedStorage:
        if cell not in held:
            held[cell] = allocate(self.nbytes[cell])
        return held[cell]

    def _own(self, output: Tensor, ref: Ref) -> torch.UntypedStorage:
        """The output's storage if it is as was foreseen, else a copy."""
        storage = output.untyped_storage()
        foreseen = (self.nbytes[ref.cell], ref.size, ref.stride, ref.offset, ref.conj, ref.neg)
        seen = (storage.nbytes(), output.size(), output.stride(), output.storage_offset())
        if (*seen, output.is_conj(), output.is_neg()) == foreseen:
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
    """A copy with the same strides, of the tensor or, where that is less (it is expanded), of its storage."""
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.itemsize < storage.nbytes():
        return tensor.detach().clone()
    copy = bytes_of(storage).clone().untyped_storage()
    return ref_of(tensor, cell=0).view(copy)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """The caller's autograd, inference mode and autocast do not reach a replay."""
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
