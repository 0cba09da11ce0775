"""What was recorded for a batch's sizes, the last few of them: ``Recent``; ``Lengths``, which knows those between too; and
``ByValues``, if values decide as well."""

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


class Recent(Generic[V]):
    """The values of the keys that were used last; the others are forgotten.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> V | None:
        """The value of a key, if it is kept."""
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def put(self, key: Hashable, value: V) -> V:
        """Keeps a value."""
        self._found[key] = value
        self._found.move_to_end(key)
        while len(self._found) > self._most:
            self._found.popitem(last=False)
        return value

    def made(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key; ``make`` makes it if it is not kept."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found


@dataclass(frozen=True)
class Sizes:
    """What a batch is told by, values of its tensors aside.

    Attributes:
        kind: all of it but its length: how it nests, types, numbers of dims, rows, constants.
        length: the size of dim 1 of its first tensor that has one; where others have that size, or one more or less, ``kind``
            has the difference.
    """

    kind: Hashable
    length: int


def sizes_of(batch: Any, *more: Hashable) -> Sizes | None:
    """What a batch is told by, and ``more`` with it; None if something in it cannot be compared."""
    leaves, spec = pytree.tree_flatten(batch)
    length = next((t.shape[1] for t in tensors_in(batch) if t.dim() > 1), 0)
    try:
        kind = spec, more, tuple(_kind(x, length) for x in leaves)
        hash(kind)
    except TypeError:
        return None
    return Sizes(kind, length)


def _kind(x: Any, length: int) -> Hashable:
    if not isinstance(x, Tensor):
        inner = pytree.tree_leaves(list(vars(x).values())) if tensors_in(x) else [x]
        return type(x), *(y if y is x else _kind(y, length) for y in inner)
    near = [("length", n - length) if d and abs(n - length) <= 1 else n for d, n in enumerate(x.shape)]
    return (x.dtype, x.device, *near)


Points = Sequence[tuple[int, V]]
Follows = Callable[[Points[V]], "Callable[[int], V] | None"]


class ByValues(Generic[V]):
    """What was recorded for batches whose values decide what a forward does, by those of their tensors that decide it.

    Args:
        most: how many are kept, of the sizes and values that were used last.
    """

    def __init__(self, most: int = 32) -> None:
        self._found = Recent[V](most)
        self._deciding: dict[
            Sizes, list[frozenset[int]]
        ] = {}  # sets of tensors that decided, by their places in a batch

    def get(self, sizes: Sizes, batch: Any) -> V | None:
        """What there is for a batch like one before, in all values that decided."""
        digests: dict[int, Hashable] = {}
        for deciding in self._deciding.get(sizes, ()):
            found = self._found.get((sizes, deciding, _digests(batch, deciding, digests)))
            if found is not None:
                return found
        return None

    def put(self, sizes: Sizes, batch: Any, deciding: frozenset[int], value: V) -> None:
        """Keeps what was recorded for a batch, of which these tensors decided."""
        known = self._deciding.setdefault(sizes, [])
        if deciding not in known:
            known.append(deciding)
        self._found.put((sizes, deciding, _digests(batch, deciding, {})), value)


def _digests(batch: Any, which: frozenset[int], known: dict[int, Hashable]) -> Hashable:
    tensors = tensors_in(batch)
    for i in which - known.keys():
        known[i] = digest(tensors[i])
    return tuple(known[i] for i in sorted(which))


@dataclass
class _Family(Generic[V]):
    """What was recorded for batches that differ in their length alone: at most three, of the shortest and the longest."""

    points: list[tuple[int, V]] = field(default_factory=list)
    between: Callable[[int], V] | None = None


class Lengths(Generic[V]):
    """What is recorded for the sizes of a batch. Between lengths that were recorded it may follow from those.

    A forward that does the same at two lengths does the same at those between, unless it asks for one length by name. What
    is longer or shorter than all before is recorded.

    Args:
        follows: what was recorded at some lengths, in their order → what gives it for a length between; None if it does
            not follow from them.
        most: how many are kept; of them, and of what they follow from.
    """

    def __init__(self, follows: Follows[V], most: int = 32) -> None:
        self._follows = follows
        self._exact, self._families = Recent[V](most), Recent[_Family[V]](most)

    def __len__(self) -> int:
        return len(self._exact)

    def made(self, sizes: Sizes | None, make: Callable[[], V]) -> V:
        """What there is for the sizes of a batch; ``make`` records it."""
        if sizes is None:
            return make()
        if (value := self._exact.get(sizes)) is not None:
            return value
        family = self._families.made(sizes.kind, _Family)
        lengths = [length for length, _ in family.points]
        if family.between is not None and lengths[0] < sizes.length < lengths[-1]:
            return self._exact.put(sizes, family.between(sizes.length))
        value = make()
        family.points = _ends_and_middle([*family.points, (sizes.length, value)])
        family.between = self._follows(family.points) if len(family.points) > 2 else None
        return self._exact.put(sizes, value)


def _ends_and_middle(points: list[tuple[int, V]]) -> list[tuple[int, V]]:
    points = sorted(dict(points).items(), key=lambda point: point[0])
    return points if len(points) <= 3 else [points[0], points[len(points) // 2], points[-1]]
