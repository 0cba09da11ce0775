"""From which memory the answers follow that a forward without weights was given: so another batch that has the same values
there takes the same path.

A forward that is run for its shapes computes what follows from the batch alone, and Python may read that (``if
mask.all():``). Each op on such values hands on where they come from:

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

_ELSEWHERE = -1  # stands for what no memory says: random numbers, tensors whose memory cannot be told (sparse ones)


class Origins:
    """Follows the values of one forward.

    Attributes:
        read: the memory, there before the forward, that answers followed from.
    """

    def __init__(self) -> None:
        self.read: set[int] = set()
        self._of: dict[int, frozenset[int]] = {}  # memory that an op gave or wrote → what its values follow from
        self._alive: list[Any] = []  # memory is told by its address, which another would get

    @property
    def unknown(self) -> bool:
        """Whether an answer followed from something besides memory: random numbers, which are others the next time."""
        return _ELSEWHERE in self.read

    def of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """What values follow from. Memory that no op gave was there before."""
        memories = [_memory(t) for t in tensors if not t.is_meta]
        return frozenset[int]().union(*(self._of.get(m, {m}) for m in memories))

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Something follows from these values besides other values: the path, or a size."""
        self.read |= self.of(tensors)

    def begin(self, func: Any, tensors: list[Tensor]) -> None:
        """An op is about to run."""
        if _tells(func, tensors):
            self.look(tensors)

    def end(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any) -> None:
        """An op on values has run."""
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


# ``torch.tensor(5)``: a number that is written down, or follows from what was read.
_OF_PYTHON = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
_INDEXED = ("index", "index_put", "index_put_", "_unsafe_index")


def _tells(func: Any, tensors: list[Tensor]) -> bool:
    """Whether an op gives a number to Python, or a tensor whose size follows from values."""
    if func.overloadpacket.__name__ in _INDEXED:  # by numbers, what it gives has the size of the index
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


__all__ = ["Origins"]
