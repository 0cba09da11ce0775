"""Caches of what was recorded for earlier batches: a program of a pipeline, a program that counts labels.

``LruCache``       any keys; drops the entry that was least recently used
``LengthCache``    by the sizes of a batch; derives the entry for a length between recorded lengths, if it can
``ValueCache``     by the sizes and values of a batch, if values decide what a forward does
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from meshwright.private import pytree
from meshwright.runtime.checksum import digest
from meshwright.runtime.rows.batch import tensors_in

V = TypeVar("V")

_MOST = 32  # entries in a cache; with batches of more sizes than these, some are recorded again
_ENDS_AND_MIDDLE = (
    3  # recorded lengths from which others are derived: the shortest, the longest, and one to test the rule
)


class LruCache(Generic[V]):
    """A cache that drops the least recently used entry when it is full.

    Args:
        most: the largest number of entries.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        """The value of a key; None if there is no entry."""
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

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """A context at whose end the entries that were made in it are dropped."""
        before = set(self._values)
        try:
            yield
        finally:
            for key in self._values.keys() - before:
                del self._values[key]

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key. If there is no entry, calls ``make`` and stores the result."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a batch, as a key. Values of its tensors are not part of it.

    Attributes:
        kind: everything except the length: structure, types, numbers of dims, rows, constants.
        length: the size of dim 1 of the first tensor that has a dim 1. If a dim (except dim 0) has this size, or one more or
            one less, ``kind`` has the difference in place of its size.
    """

    kind: Hashable
    length: int


def sizes_of(batch: Any, *more: Hashable) -> BatchSizes | None:
    """The sizes of a batch; ``more`` becomes a part of their kind. None if a value in the batch is not hashable."""
    leaves, spec = pytree.tree_flatten(batch)
    length = next((t.shape[1] for t in tensors_in(batch) if t.dim() > 1), 0)
    try:
        kind = spec, more, tuple(_leaf_kind(x, length) for x in leaves)
        hash(kind)
    except TypeError:
        return None
    return BatchSizes(kind, length)


def _leaf_kind(x: Any, length: int, outer: tuple[Any, ...] = ()) -> Hashable:
    """The part of ``BatchSizes.kind`` for a leaf of a batch.

    Args:
        outer: the objects that contain x, one within the other. If x is one of them, its place among them stands for it: an
            object may refer back to itself, and what it holds is in the key already.
    """
    if isinstance(x, Tensor):
        shape = [("length", n - length) if d and abs(n - length) <= 1 else n for d, n in enumerate(x.shape)]
        return (x.dtype, x.device, *shape)
    for i, container in enumerate(outer):
        if container is x:
            return "container", i
    if not tensors_in(x):
        return type(x), x
    attributes = pytree.tree_leaves(list(vars(x).values()))
    return type(x), *(_leaf_kind(value, length, (*outer, x)) for value in attributes)


Points = Sequence[tuple[int, V]]
"""(length, what was recorded for it), for some lengths."""

Rule = Callable[[Points[V]], "Callable[[int], V] | None"]
"""The points of a kind, the shortest length first → a function that derives the value for a length between them; None if there
is no such function."""


class ValueCache(Generic[V]):
    """A cache for batches whose values decide what a forward does. The values of the deciding tensors are part of the key.

    Args:
        most: the largest number of entries.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._recent = LruCache[V](most)
        self._deciding: dict[
            BatchSizes, list[frozenset[int]]
        ] = {}  # sets of deciding tensors, by their index in a batch

    def forgetting(self) -> AbstractContextManager[None]:
        """As that of ``LruCache``."""
        return self._recent.forgetting()

    def get(self, sizes: BatchSizes, batch: Any) -> V | None:
        """The entry of an earlier batch with the same sizes and the same deciding values; None if there was none."""
        digests: dict[int, Hashable] = {}
        for deciding in self._deciding.get(sizes, ()):
            value = self._recent.get((sizes, deciding, _digests(batch, deciding, digests)))
            if value is not None:
                return value
        return None

    def put(self, sizes: BatchSizes, batch: Any, deciding: frozenset[int], value: V) -> None:
        """Stores what was recorded for a batch; ``deciding``: the indices of its tensors whose values decided."""
        sets = self._deciding.setdefault(sizes, [])
        if deciding not in sets:
            sets.append(deciding)
        self._recent.put((sizes, deciding, _digests(batch, deciding, {})), value)


def _digests(batch: Any, indices: frozenset[int], cache: dict[int, Hashable]) -> Hashable:
    """Digests of some tensors of a batch. ``cache``: index → digest, for digests that were computed before."""
    tensors = tensors_in(batch)
    for i in indices - cache.keys():
        cache[i] = digest(tensors[i])
    return tuple(cache[i] for i in sorted(indices))


@dataclass
class _Family(Generic[V]):
    """The records for batches that differ only in their length.

    Attributes:
        points: at most three: the shortest length, one between, the longest.
        between: derives the value for a length between the shortest and the longest; None if values do not follow.
    """

    points: list[tuple[int, V]] = field(default_factory=list)
    between: Callable[[int], V] | None = None


class LengthCache(Generic[V]):
    """A cache by the sizes of a batch. Derives the entry for a length between recorded lengths, if it can.

    A forward that computes the same at two lengths computes the same between them, unless it compares the length with a
    constant. A batch that is longer or shorter than all earlier batches is recorded.

    Args:
        rule: finds how values follow from the length.
        most: the largest number of entries, and of families.
    """

    def __init__(self, rule: Rule[V], most: int = _MOST) -> None:
        self._rule = rule
        self._exact = LruCache[V](most)
        self._families = LruCache[_Family[V]](most)

    def __len__(self) -> int:
        return len(self._exact)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """As that of ``LruCache``."""
        with self._exact.forgetting(), self._families.forgetting():
            yield

    def get_or_make(self, sizes: BatchSizes | None, make: Callable[[], V]) -> V:
        """The entry for the sizes of a batch. If there is none, derives it, or calls ``make`` to record it."""
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
        family.between = self._rule(family.points) if len(family.points) == _ENDS_AND_MIDDLE else None
        return self._exact.put(sizes, value)


def _ends_and_middle(points: list[tuple[int, V]]) -> list[tuple[int, V]]:
    """The points of the shortest, a middle and the longest length."""
    points = sorted(dict(points).items(), key=lambda point: point[0])
    return points if len(points) <= _ENDS_AND_MIDDLE else [points[0], points[len(points) // 2], points[-1]]
