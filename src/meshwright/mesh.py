"""``Mesh``: named axes and their sizes, and the groups of ranks along each axis.

Ranks are numbered with the last axis fastest, as `init_device_mesh` of `torch.distributed` does:

    dp_shard=2 × tp=3          tp 0  tp 1  tp 2
                  dp_shard 0      0     1     2       tp:       {0, 1, 2} {3, 4, 5}
                  dp_shard 1      3     4     5       dp_shard: {0, 3} {1, 4} {2, 5}

A mesh is a value: it starts no process, holds no process group, and may be larger than the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeAlias, TypeVar

from meshwright.errors import Findings, listing, nearest

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes: pipeline stages; replicated and sharded data; tensors."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes over which the rows of a batch are divided."""

ALIASES = {"fsdp": "dp_shard", "ddp": "dp_replicate"}
"""Other words for axes."""

_T = TypeVar("_T")
_NUMBER = re.compile("-?[0-9]{1,18}")


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first.

    Attributes:
        axes: pairs of name and size, in the order in which they were passed; aliases are resolved.

    Raises:
        PlanError: an unknown axis, an axis twice, a size that is not a whole number of at least 1, or no axis.

    Example:
        >>> mesh = Mesh.parse("dp_shard=2,tp=3")
        >>> mesh.coordinate(4)
        {'dp_shard': 1, 'tp': 1}
        >>> mesh.groups("tp")
        [[0, 1, 2], [3, 4, 5]]
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        findings = Findings("this mesh")
        axes = _checked(tuple(self.axes), findings, _place, text=False)
        findings.raise_if_any()
        object.__setattr__(self, "axes", axes)

    @classmethod
    def parse(cls, spec: MeshLike) -> Mesh:
        """A mesh from ``"dp_shard=2,tp=2"``, ``{"dp_shard": 2, "tp": 2}``, or a mesh itself.

        Raises:
            PlanError: with every problem of ``spec``.
        """
        findings = Findings("this mesh")
        mesh = read_mesh(spec, findings, _place)
        findings.raise_if_any()
        assert mesh is not None
        return mesh

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def axis_size(self, name: str) -> int:
        """The size of an axis; 1 if the mesh lacks it. Raises ValueError for a word that is no axis."""
        return dict(self.axes).get(_known(name), 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis. Raises ValueError if the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} in the mesh {self}: its ranks are 0 to {self.size - 1}")
        indices = []
        for name, size in reversed(self.axes):
            rank, index = divmod(rank, size)
            indices.append((name, index))
        return dict(reversed(indices))

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; the index on an axis left out is 0. The inverse of `coordinate`.

        Raises ValueError for an index beyond the end of an axis. (An axis that the mesh lacks has size 1.)
        """
        indices = {_known(name): index for name, index in coordinate.items()}
        for name, index in indices.items():
            if not 0 <= index < self.axis_size(name):
                raise ValueError(f"no {name} {index} in the mesh {self}")
        rank = 0
        for name, size in self.axes:
            rank = rank * size + indices.get(name, 0)
        return rank

    def along(self, ranks: Sequence[int]) -> str:
        """The axes along which ranks differ, joined by dots; empty for one rank.

        >>> Mesh.parse("dp_shard=2,tp=2").along([0, 2]), Mesh.parse("dp_shard=2,tp=2").along(range(4))
        ('dp_shard', 'dp_shard·tp')
        """
        coordinates = [self.coordinate(rank) for rank in ranks]
        return "·".join(axis for axis in self.names if len({c[axis] for c in coordinates}) > 1)

    def groups(self, *names: str) -> list[list[int]]:
        """The groups of ranks that differ along the named axes only, sorted by rank, within and among the groups.

        Every rank is in exactly one group. An axis that the mesh lacks has no effect.
        """
        offsets = self._offsets(names, along=True)
        return [[first + offset for offset in offsets] for first in self._offsets(names, along=False)]

    def group_of(self, rank: int, *names: str) -> list[int]:
        """The group along the named axes that contains ``rank``: one of `groups`."""
        along = {_known(name) for name in names}
        first = self.rank({name: 0 if name in along else i for name, i in self.coordinate(rank).items()})
        return [first + offset for offset in self._offsets(names, along=True)]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes of the mesh over which the rows of a batch are divided, in mesh order."""
        return tuple(name for name in self.names if name in DATA_AXES)

    @property
    def data_size(self) -> int:
        """The number of data ranks: of pieces into which the rows of a batch are divided."""
        return prod(self.axis_size(name) for name in self.data_axes)

    def data_index(self, rank: int) -> int:
        """Which of the `data_size` pieces of a batch a rank reads; the ranks of a ``tp`` group read the same one."""
        return self.group_of(rank, *self.data_axes).index(rank)

    def picture(self) -> str:
        """The mesh as text: a table of the ranks, and the groups along each axis. Large meshes are abridged."""
        return "\n".join(
            [f"{self}: {self.size} rank{'s'[: self.size > 1]}", "", *_table(self), "", *_group_lines(self)]
        )

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes)

    def _offsets(self, names: Iterable[str], *, along: bool) -> list[int]:
        """The rank numbers at all indices of the named axes (not ``along``: of all other axes), with index 0 on the rest;
        ascending."""
        named = {_known(name) for name in names}
        sizes = [size if (name in named) is along else 1 for name, size in self.axes]
        strides = [prod(self.shape[i + 1 :]) for i in range(len(self.axes))]
        return [sum(i * s for i, s in zip(indices, strides, strict=True)) for indices in product(*map(range, sizes))]


MeshLike: TypeAlias = Mesh | Mapping[str, int] | str


def read_mesh(
    spec: object, findings: Findings, where: Callable[[str], str], aliases: Mapping[str, str] = ALIASES
) -> Mesh | None:
    """A mesh from any value; None if the value is wrong.

    Args:
        spec: an argument of `Mesh.parse`; anything else is a finding.
        findings: problems are added to it.
        where: name of an axis → its position, for a finding; ``""`` → the position of the mesh.
        aliases: other words for axes.
    """
    if isinstance(spec, Mesh):
        return spec
    before, text = len(findings), isinstance(spec, str)
    if isinstance(spec, str):
        pairs = _pairs(spec, findings, where)
    elif isinstance(spec, Mapping):
        pairs = tuple(spec.items())
    else:
        example = "mesh: {dp_shard: 2, tp: 2}"
        findings.add(where=where(""), given=repr(spec), required="axes with their sizes", fix=example)
        return None
    axes = () if len(findings) > before and not pairs else _checked(pairs, findings, where, aliases, text=text)
    return Mesh(axes) if len(findings) == before else None


def _pairs(text: str, findings: Findings, where: Callable[[str], str]) -> tuple[tuple[str, object], ...]:
    """``"dp_shard=2,tp=2"`` as pairs. ``×`` may stand between axes too, as in the text of a mesh."""
    pairs: list[tuple[str, object]] = []
    for item in text.replace("×", ",").split(",") if text.strip() else ():
        name, sign, size = (part.strip() for part in item.partition("="))
        if not (sign and name and size):
            example = f"{name or 'tp'}={size or 2}"
            findings.add(where=where(""), given=repr(item), required="axis=size", fix=example)
        else:
            pairs.append((name, int(size) if _NUMBER.fullmatch(size) else size))
    return tuple(pairs)


def _checked(
    pairs: Sequence[tuple[object, object]],
    findings: Findings,
    where: Callable[[str], str],
    aliases: Mapping[str, str] = ALIASES,
    *,
    text: bool,
) -> tuple[tuple[str, int], ...]:
    """The pairs with aliases resolved; problems are added to ``findings``. ``text``: write fixes as ``a=2``, not ``a: 2``."""
    sign = "=" if text else ": "
    sizes: dict[str, int] = {}
    words: dict[str, object] = {}  # axis → the word by which it was named first
    if not pairs:
        required = f"at least one axis: {listing(AXES)}"
        findings.add(where=where(""), given="no axis", required=required, fix=f"dp_shard{sign}1")
    for word, size in pairs:
        name = aliases.get(word, word) if isinstance(word, str) else str(word)
        position = where(str(word))
        if name not in AXES:
            required, axis = _no_axis(name)
            fix = f"{axis}{sign}{_size(size)}"
            findings.add(where=position, given=f"the axis {name}", required=required, fix=fix)
        elif name in words:
            other = f", another word for {words[name]}" if word != words[name] else " again"
            fix = f"{name}{sign}{sizes.get(name, 2)}"
            findings.add(where=position, given=f"{word}{sign}{size}{other}", required="each axis once", fix=fix)
        if not _is_size(size):
            fix = f"{name if name in AXES else 'tp'}{sign}2"
            findings.add(where=position, given=f"{word}{sign}{size}", required="a whole number of at least 1", fix=fix)
        if name in AXES:
            words.setdefault(name, word)
            sizes.setdefault(name, _size(size))
    return tuple(sizes.items())


def _no_axis(name: str) -> tuple[str, str]:
    """For a word that is no axis: (what is required, the axis to suggest)."""
    near = nearest(name, (*AXES, *ALIASES))
    if not near:
        return f"an axis: {listing(AXES)}", "dp_shard"
    return f"an axis: {listing(AXES)}; did you mean {near[0]}?", ALIASES.get(near[0], near[0])


def _size(size: object) -> int:
    """A size for a fix: ``size`` itself if it is valid, else 2."""
    return size if isinstance(size, int) and _is_size(size) else 2


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _known(name: str) -> str:
    """The axis that a word names. Raises ValueError if it names none."""
    axis = ALIASES.get(name, name)
    if axis not in AXES:
        raise ValueError(f"no axis {name!r}: required is {_no_axis(name)[0]}")
    return axis


def _place(axis: str) -> str:
    return f"mesh.{axis}" if axis else "mesh"


_MOST = 8  # up to so many rows, columns and groups are shown in full


def _table(mesh: Mesh) -> list[str]:
    """The table of ranks: a column for each index on the last axis, a row for each combination on the other axes."""
    *outer, (last, width) = mesh.axes
    columns = _few(list(range(width)))
    body = []
    for row in _few(list(product(*(range(size) for _, size in outer)))):
        if row is None:
            body.append(["…"] * (len(columns) + 1))
            continue
        indices = {name: index for (name, _), index in zip(outer, row, strict=True)}
        label = " · ".join(f"{name} {index}" for name, index in indices.items())
        body.append([label, *("…" if c is None else str(mesh.rank({**indices, last: c})) for c in columns)])
    rows = [["", *("…" if c is None else f"{last} {c}" for c in columns)], *body]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _group_lines(mesh: Mesh) -> list[str]:
    """A line for each axis: its groups."""
    wide = max(len(name) for name in mesh.names)
    lines = []
    for name in mesh.names:
        groups = ("…" if group is None else _braces(group) for group in _few(mesh.groups(name)))
        lines.append(f"{name.ljust(wide)}  {'  '.join(groups)}")
    return lines


def _braces(group: list[int]) -> str:
    return "{" + ", ".join("…" if rank is None else str(rank) for rank in _few(group)) + "}"


def _few(items: list[_T]) -> list[_T | None]:
    """The items; of many items the first ones and the last, with None for those between."""
    return [*items] if len(items) <= _MOST else [*items[: _MOST - 2], None, items[-1]]
