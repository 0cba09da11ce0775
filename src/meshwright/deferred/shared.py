"""What shares memory with parameters when ``build()`` has ended.

On one device, an update of such a parameter is seen in the other tensor too. A job cannot keep that: each rank has a part of a
parameter, in memory of its own. So planning refuses models that use such tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from meshwright.private import storage_of


@dataclass
class SharedMemory:
    """What shared memory with the trained parameters of a model.

    Attributes:
        pairs: names of a trained parameter and another parameter or buffer that overlap in memory.
    """

    pairs: list[tuple[str, str]] = field(default_factory=list)
    # Storage → (a reference that does not keep it alive, and by which no new storage gets the same number; what is in it).
    _kept: dict[int, tuple[StorageWeakRef, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, computed: Mapping[str, Tensor]) -> SharedMemory:
        """Looks at a model whose parameters are still where ``build()`` made them.

        Args:
            computed: name → an attribute that was computed from parameters, with a graph.
        """
        memory = cls(list(_overlapping(model)))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, t in {**computed, **trained}.items():
            if _has_memory(t) and not t.is_meta:  # a parameter on meta stays where it is
                memory._kept[storage_of(t)] = StorageWeakRef(t.untyped_storage()), name
        return memory

    def __bool__(self) -> bool:
        """Whether a tensor of a forward may be in memory that parameters had: whether some is alive without them."""
        return not all(ref.expired() for ref, _ in self._kept.values())

    def origin(self, t: Tensor) -> str | None:
        """The name of what was in this memory when ``build()`` ended: a parameter, or an attribute computed from some."""
        found = self._kept.get(storage_of(t)) if _has_memory(t) else None
        return None if found is None or found[0].expired() else found[1]


def _overlapping(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of two tensors of a model that overlap in memory, and of which one is trained."""
    tensors = [
        (name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if _has_memory(t) and t.numel()
    ]
    order = {name: position for position, (name, _) in enumerate(tensors)}
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, t in sorted(tensors, key=lambda named: _extent(named[1])):
        open_ones = by_storage.setdefault(storage_of(t), [])  # those that may reach to where this one begins
        open_ones[:] = [(other, x) for other, x in open_ones if _extent(x)[1] > _extent(t)[0]]
        for other, x in open_ones:
            if (_is_trained(x) or _is_trained(t)) and _overlap(x, t):
                first, second = sorted((other, name), key=order.__getitem__)
                yield first, second
        open_ones.append((name, t))


def _is_trained(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter) and t.requires_grad


def _has_memory(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested and not is_lazy(t)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one storage, whose extents overlap, have an element in common."""
    (first, stop), (other_first, other_stop) = map(_extent, (x, y))
    if first == other_first or x.dtype != y.dtype:
        return True
    begin, end = (n // x.element_size() for n in (min(first, other_first), max(stop, other_stop)))
    taken = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    taken.as_strided(x.shape, x.stride(), first // x.element_size() - begin).fill_(True)
    return bool(taken.as_strided(y.shape, y.stride(), other_first // x.element_size() - begin).any())


def _extent(t: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte after its last one."""
    last = int(t.storage_offset()) + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset()) * t.element_size(), (last + 1) * t.element_size()
