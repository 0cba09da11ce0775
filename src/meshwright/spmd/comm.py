"""A mesh axis as the view uses it: this rank's place on it and the collectives over it, counted.

``Axis`` talks to a process group. ``PlannedAxis`` gives the shapes alone: planning runs the same rules over it, on meta
tensors, without processes.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout import Shard
from meshwright.private import without_modes

Heard = Callable[[str, Any, Callable[[], Any], tuple[Any, ...]], Any]
"""(method of a process group, the group, what calls it, its arguments) → what it gives"""


@dataclass(eq=False)
class Order:
    """The collectives of a group, in the order in which this rank has entered them, as one number.

    Ranks of the group that entered the same collectives, on tensors of the same whole shapes and types, have the same number.

    Attributes:
        number: of all collectives so far.
        meet: if set, it is called with a description before each collective that ranks wait in. So ranks see a difference
            before they wait for each other in different collectives (runtime/guard.py).
    """

    number: int = 0
    meet: Callable[[str], None] | None = None

    def enter(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """A collective begins that ranks wait in; ``shape`` is that of the whole tensor, as shares may be uneven."""
        self.note(kind, shape, dtype)
        if self.meet is not None:
            self.meet(f"{kind} of {tuple(shape)} {str(dtype).removeprefix('torch.')}")

    def note(self, kind: str, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> None:
        """A collective begins that ranks do not wait in."""
        # Integers have the same hash in every process; a text has not.
        self.number = hash((self.number, _KINDS[kind], *shape, -1 if dtype is None else _DTYPES[dtype]))


_KINDS = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 3, "fork": 4, "join": 5}
_DTYPES = {
    dtype: i for i, dtype in enumerate(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
}


@dataclass(eq=False)
class Ledger:
    """What a run of the view did: collectives by kind (calls, bytes put in by this rank) and fallbacks by place.

    Attributes:
        orders: place → the order of the collectives of its tp group, of each place that this rank is of.
        heard: calls what does not go through the stand-ins of ``one_process``, while a step is observed; else None.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    orders: defaultdict[int, Order] = field(default_factory=lambda: defaultdict(Order))
    heard: Heard | None = None

    def moved(self, kind: str, tensor: Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Fallback:
    """One place where the view gathered its arguments and ran a function whole: right, but not cut."""

    function: str
    module: str
    line: str

    def __str__(self) -> str:
        return f"{self.function} in {self.module or 'the model'} at {self.line}"


Method = TypeVar("Method", bound=Callable[..., Any])


def locally(method: Method) -> Method:
    """What is done with local tensors passes the view by, which in a backward is on, and would look at every function."""

    @functools.wraps(method)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return method(*args, **kwargs)

    return plainly  # type: ignore[return-value]


class Axis:
    """One axis of the mesh as one rank sees it. Collectives take and give local tensors.

    Args:
        name: the axis, as in the plan.
        size: ranks on it.
        rank: this rank's place on it.
        group: the process group of the ranks that differ from this one on this axis alone.
        ledger: where calls and bytes are counted.
        place: whose axis it is; the ledger has the order of its collectives.
    """

    def __init__(
        self, name: str, size: int, rank: int, group: dist.ProcessGroup | None, ledger: Ledger, place: int = 0
    ) -> None:
        self.name, self.size, self.rank, self.group, self.ledger = name, size, rank, group, ledger
        self.order = ledger.orders[place]

    @locally
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        self._enter("all_reduce", x, x.shape)
        carried = _carried(x)
        out = carried.clone(memory_format=torch.contiguous_format)
        _add_up(out, op, self.group, self.ledger.heard)
        return _delivered(out, x.dtype)

    @locally
    def all_gather(self, x: Tensor, layout: Shard) -> Tensor:
        """From this rank's slice to the whole tensor."""
        self._enter("all_gather", x, _with_size(x, layout))
        padded = _pad(x, layout.dim, self._widest(layout))
        sent = _flat(padded)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.group)
        chunks = [c.view(x.dtype).reshape(padded.shape) for c in received]
        return layout.merge([c.narrow(layout.dim, 0, layout.local(r)) for r, c in enumerate(chunks)])

    @locally
    def reduce_scatter(self, x: Tensor, layout: Shard) -> Tensor:
        """From a summand of the whole tensor to this rank's slice of the sum."""
        self._enter("reduce_scatter", x, x.shape)
        width = self._widest(layout)
        chunks = [_pad(layout.take(_carried(x), r), layout.dim, width) for r in range(self.size)]
        out = torch.empty_like(chunks[0])
        dist.reduce_scatter(out, chunks, group=self.group)
        return _delivered(out.narrow(layout.dim, 0, layout.local(self.rank)), x.dtype)

    @locally
    def all_to_all(self, x: Tensor, source: Shard, target: Shard) -> Tensor:
        """From this rank's slice under ``source`` to its slice under ``target``, another dim."""
        self._enter("all_to_all", x, _with_size(x, source))
        # Flat, with split sizes: gloo's all_to_all of a list wants equal sizes.
        sent = [_flat(target.take(x, r)) for r in range(self.size)]
        shapes = []
        for r in range(self.size):
            shape = list(x.shape)
            shape[source.dim] = source.local(r)
            shape[target.dim] = target.local(self.rank)
            shapes.append(shape)
        width = x.element_size() // sent[0].element_size()
        sizes = [prod(shape) * width for shape in shapes]
        out = sent[0].new_empty(sum(sizes))
        dist.all_to_all_single(out, torch.cat(sent), sizes, [t.numel() for t in sent], group=self.group)
        pieces = zip(out.view(x.dtype).split([prod(shape) for shape in shapes]), shapes, strict=True)
        return source.merge([piece.view(shape) for piece, shape in pieces])

    def _enter(self, kind: str, x: Tensor, shape: Sequence[int]) -> None:
        """``shape``: of the whole tensor."""
        self.ledger.moved(kind, x)
        self.order.enter(kind, shape, x.dtype)

    def _widest(self, layout: Shard) -> int:
        return max(layout.local(r) for r in range(self.size))


class PlannedAxis(Axis):
    """An axis without processes: the shapes and the counts of its collectives, on meta tensors."""

    def __init__(self, name: str, size: int, rank: int, ledger: Ledger) -> None:
        super().__init__(name, size, rank, None, ledger)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        self.ledger.moved("all_reduce", x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def all_gather(self, x: Tensor, layout: Shard) -> Tensor:
        self.ledger.moved("all_gather", x)
        return _resized(x, layout.dim, layout.size)

    def reduce_scatter(self, x: Tensor, layout: Shard) -> Tensor:
        self.ledger.moved("reduce_scatter", x)
        return _resized(x, layout.dim, layout.local(self.rank))

    def all_to_all(self, x: Tensor, source: Shard, target: Shard) -> Tensor:
        self.ledger.moved("all_to_all", x)
        return _resized(_resized(x, source.dim, source.size), target.dim, target.local(self.rank))


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, False
    return options


_OPTIONS: dict[str, Any] = (
    {"sum": _all_reduce_options(dist.ReduceOp.SUM), "max": _all_reduce_options(dist.ReduceOp.MAX)}
    if dist.is_available()
    else {}
)
_ALL_REDUCE: Any = (
    dist.ProcessGroup.allreduce if dist.is_available() else None
)  # as it is before a stand-in takes its place


def _add_up(x: Tensor, op: str, group: dist.ProcessGroup | None, heard: Heard | None) -> None:
    """``dist.all_reduce`` in place, without its look at each argument, which takes longer than a small tensor's sum; nor does
    it go through a stand-in for the group's method, which ``heard`` would be asked in."""
    given = [x], _OPTIONS[op]
    work = (
        _ALL_REDUCE(group, *given)
        if heard is None
        else heard("allreduce", group, partial(_ALL_REDUCE, group, *given), given)
    )
    if work is not None:
        work.wait()


# Types that gloo or NCCL does not add up, and those in which they are.
_NARROW = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


def _carried(x: Tensor) -> Tensor:
    """``x`` in a type that every backend carries; complex numbers as pairs, in a further last dim."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.to(_NARROW[x.dtype]) if x.dtype in _NARROW else x


def _delivered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``_carried``."""
    if dtype.is_complex:
        return torch.view_as_complex(x.contiguous())
    return x.to(dtype) if dtype in _NARROW else x


def _flat(x: Tensor) -> Tensor:
    """The elements of ``x`` in one dim, as bytes where neither gloo nor NCCL knows the dtype."""
    x = x.resolve_conj().resolve_neg()
    return (
        x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        if x.dtype in _UNKNOWN
        else x.reshape(-1)
    )


_UNKNOWN = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _with_size(x: Tensor, layout: Shard) -> list[int]:
    """The shape of a tensor of which ``x`` is a slice."""
    shape = list(x.shape)
    shape[layout.dim] = layout.size
    return shape


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with dim ``dim`` filled up with zeros to ``size``: collectives want equal sizes on all ranks."""
    missing = size - x.size(dim)
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
