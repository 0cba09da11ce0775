"""``Origins``: the memory on which a forward's path depends. Another batch with the same values there takes the same path.

A forward that runs for its shapes computes the tensors that follow from the batch alone, and Python may read their values
(``if mask.all():``). Each op on such tensors passes their origins on to its results:

    attention_mask ──► == 1 ──► all ──► read: the path follows from attention_mask
    input_ids ──────► == pad ──► a mask that no one reads
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.described import tensors_among
from meshwright.private import storage_of
from meshwright.spmd.torch_functions import op_facts, written_by

_ELSEWHERE = -1  # the origin of random numbers, and of tensors whose memory cannot be identified (sparse ones)


class Origins:
    """Follows the values of one forward.

    Attributes:
        read: memories from before the forward whose values decided something: the path, or a size.
    """

    def __init__(self) -> None:
        self.read: set[int] = set()
        self._of: dict[int, frozenset[int]] = {}  # memory that an op made or wrote → the origins of its values
        self._alive: list[Any] = []  # storages, kept so that no other tensor gets their address

    @property
    def unknown(self) -> bool:
        """Whether the path depends on something besides memory: random numbers, which differ the next time."""
        return _ELSEWHERE in self.read

    def of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The origins of the values of ``tensors``. Memory that no op made is its own origin: it is from before the forward."""
        memories = [_memory(t) for t in tensors if not t.is_meta]
        return frozenset[int]().union(*(self._of.get(m, {m}) for m in memories))

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Records that the path, or a size, depends on the values of ``tensors``."""
        self.read |= self.of(tensors)

    def begin(self, func: Any, tensors: list[Tensor]) -> None:
        """Called before each op. Records its inputs if it returns a number to Python, or a size that depends on values."""
        if _tells(func, tensors):
            self.look(tensors)

    def end(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any) -> None:
        """Called after each op on tensors with values. Gives its results and targets the origins of its inputs."""
        sources = frozenset[int]() if func in _OF_PYTHON else self.of(tensors)
        if op_facts(func).draws:
            sources |= {_ELSEWHERE}
        written = tensors_among(value for _, value in written_by(func, args, kwargs))
        for t in (*tensors_among((out,)), *written):
            if t.is_meta or (m := _memory(t)) == _ELSEWHERE:
                continue
            before = self._of.get(m, {m} if any(t is x for x in written) else frozenset[int]())
            if m not in self._of:
                self._alive.append(t.untyped_storage())
            self._of[m] = sources | before


def _memory(t: Tensor) -> int:
    try:
        return storage_of(t) if t.layout is torch.strided else _ELSEWHERE
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func
        return _ELSEWHERE


# ``torch.tensor(5)``: a literal, or a number that Python computed from values whose read is recorded already.
_OF_PYTHON = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
_INDEXED = ("index", "index_put", "index_put_", "_unsafe_index")


def _tells(func: Any, tensors: list[Tensor]) -> bool:
    """Whether an op returns a number to Python, or a tensor whose size depends on values."""
    if func.overloadpacket.__name__ in _INDEXED:  # only a mask decides the size; by numbers it is the size of the index
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


__all__ = ["Origins"]
