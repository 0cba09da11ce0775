"""Caches of what was recorded for batches.

``Recent``     the entries that were used last
``Lengths``    by the sizes of a batch; for a length between recorded ones the entry may be derived from these
``ByValues``   by the sizes and values of a batch, where values decide what a forward does
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from meshwright.private import pytree
from meshwright.runtime.checksum import digest
from meshwright.runtime.rows.batch import tensors_in

V = TypeVar("V")

_MOST = 32  # entries in a cache: a run with more sizes than these buckets them, or records some of them again
_ENDS_AND_MIDDLE = 3  # lengths to derive others from: the shortest, the longest, and one to test the derivation on


class Recent(Generic[V]):
    """A cache of the entries that were used last; older ones are dropped.

    Args:
        most: the most entries that it has.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        """The value of a key; None if it has none."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: V) -> V:
        """Stores a value, and returns it."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return value

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key; if it has none, ``make`` makes it, and it is stored."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch, as a key. Values of its tensors are not part of it.

    Attributes:
        kind: all but the length: the structure, types, numbers of dims, rows, constants.
        length: the size of dim 1 of the first tensor that has one. A dim that has this size, or one more or less, stands in
            ``kind`` as the difference.
    """

    kind: Hashable
    length: int


def sizes_of(batch: Any, *more: Hashable) -> Sizes | None:
    """The sizes of a batch; ``more`` becomes part of their kind. None if something in the batch is not hashable."""
    leaves, spec = pytree.tree_flatten(batch)
    length = next((t.shape[1] for t in tensors_in(batch) if t.dim() > 1), 0)
    try:
        kind = spec, more, tuple(_kind(x, length) for x in leaves)
        hash(kind)
    except TypeError:
        return None
    return Sizes(kind, length)


def _kind(x: Any, length: int) -> Hashable:
    """The part of ``Sizes.kind`` for a leaf of a batch."""
    if not isinstance(x, Tensor):
        inner = pytree.tree_leaves(list(vars(x).values())) if tensors_in(x) else [x]
        return type(x), *(y if y is x else _kind(y, length) for y in inner)
    shape = [("length", n - length) if d and abs(n - length) <= 1 else n for d, n in enumerate(x.shape)]
    return (x.dtype, x.device, *shape)


Points = Sequence[tuple[int, V]]  # (length, what was recorded)
Follows = Callable[[Points[V]], "Callable[[int], V] | None"]


class ByValues(Generic[V]):
    """A cache for batches whose values decide what a forward does. The key has the values of the tensors that decide.

    Args:
        most: the most entries that it has.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._recent = Recent[V](most)
        self._deciding: dict[Sizes, list[frozenset[int]]] = {}  # sets of deciding tensors, by their index in a batch

    def get(self, sizes: Sizes, batch: Any) -> V | None:
        """The entry of an earlier batch with the same sizes and the same deciding values; None if there was none."""
        digests: dict[int, Hashable] = {}
        for deciding in self._deciding.get(sizes, ()):
            value = self._recent.get((sizes, deciding, _digests(batch, deciding, digests)))
            if value is not None:
                return value
        return None

    def put(self, sizes: Sizes, batch: Any, deciding: frozenset[int], value: V) -> None:
        """Stores what was recorded for a batch; ``deciding``: the indices of its tensors whose values decided."""
        sets = self._deciding.setdefault(sizes, [])
        if deciding not in sets:
            sets.append(deciding)
        self._recent.put((sizes, deciding, _digests(batch, deciding, {})), value)


def _digests(batch: Any, indices: frozenset[int], cache: dict[int, Hashable]) -> Hashable:
    """Digests of some tensors of a batch; ``cache``: index → digest, of those that were computed before."""
    tensors = tensors_in(batch)
    for i in indices - cache.keys():
        cache[i] = digest(tensors[i])
    return tuple(cache[i] for i in sorted(indices))


@dataclass
class _Family(Generic[V]):
    """What was recorded for batches that differ only in their length.

    Attributes:
        points: (length, what was recorded), at most three: the shortest, one between, the longest.
        between: a length → what is derived for it; None if nothing can be.
    """

    points: list[tuple[int, V]] = field(default_factory=list)
    between: Callable[[int], V] | None = None


class Lengths(Generic[V]):
    """A cache by the sizes of a batch. For a length between recorded ones the entry may be derived from these.

    A forward that does the same at two lengths does the same between them, unless it asks for one length by name. A batch
    that is longer, or shorter, than all before is recorded.

    Args:
        follows: what was recorded at some lengths, in ascending order → a function that derives it for a length between;
            None if it cannot be derived.
        most: the most entries that it has; and the most families.
    """

    def __init__(self, follows: Follows[V], most: int = _MOST) -> None:
        self._follows = follows
        self._exact, self._families = Recent[V](most), Recent[_Family[V]](most)

    def __len__(self) -> int:
        return len(self._exact)

    def get_or_make(self, sizes: Sizes | None, make: Callable[[], V]) -> V:
        """The entry for the sizes of a batch, if need be derived from others, else recorded by ``make``."""
        if sizes is None:
            return make()
        if (value := self._exact.get(sizes)) is not None:
            return value
        family = self._families.get_or_make(sizes.kind, _Family)
        lengths = [length for length, _ in family.points]
        if family.between is not None and lengths[0] < sizes.length < lengths[-1]:
            return self._exact.put(sizes, family.between(sizes.length))
        value = make()
        family.points = _ends_and_middle([*family.points, (sizes.length, value)])
        family.between = self._follows(family.points) if len(family.points) == _ENDS_AND_MIDDLE else None
        return self._exact.put(sizes, value)


def _ends_and_middle(points: list[tuple[int, V]]) -> list[tuple[int, V]]:
    points = sorted(dict(points).items(), key=lambda point: point[0])
    return points if len(points) <= _ENDS_AND_MIDDLE else [points[0], points[len(points) // 2], points[-1]]
